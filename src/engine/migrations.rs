//! The migrations this build carries, in order. The SQL is in `migrations/`.

use sha2::{Digest as _, Sha256};

pub struct SqlFile {
    pub path: &'static str,
    pub sql: &'static str,
}

pub struct Migration {
    pub version: i32,
    pub name: &'static str,
    pub files: &'static [SqlFile],
}

impl Migration {
    /// Recorded with the version, so that a schema made by another build of it is noticed.
    pub fn checksum(&self) -> String {
        let mut hash = Sha256::new();
        for file in self.files {
            hash.update(file.sql.as_bytes());
            hash.update([0]);
        }
        hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }
}

macro_rules! sql {
    ($($path:literal),+ $(,)?) => {
        &[$(SqlFile {
            path: $path,
            sql: include_str!(concat!("../../migrations/", $path)),
        }),+]
    };
}

/// Ours start at 1000, far from the peer's numbers, so that nobody mistakes one for the other.
pub const FIRST: i32 = 1000;

pub const MIGRATIONS: &[Migration] = &[Migration {
    version: FIRST,
    name: "the 0.6 engine",
    files: sql![
        "v1000/00_meta.sql",
        "v1000/10_queue_ring.sql",
        "v1000/20_claim_ring.sql",
        "v1000/21_lease_ring.sql",
        "v1000/30_plain.sql",
        "v1000/40_ring_children.sql",
        "v1000/43_job_body.sql",
        "v1000/50_enqueue.sql",
        "v1000/51_claim.sql",
        "v1000/52_holes.sql",
        "v1000/53_complete.sql",
        "v1000/54_close.sql",
        "v1000/55_promote.sql",
        "v1000/56_rotate.sql",
        "v1000/57_prune.sql",
        "v1000/58_views.sql",
        "v1000/59_counts.sql",
        "v1000/60_unique.sql",
        "v1000/61_leases.sql",
        "v1000/62_heartbeat.sql",
        "v1000/63_rescue.sql",
        "v1000/64_find_job.sql",
        "v1000/65_operate.sql",
        "v1000/66_jobs.sql",
        "v1000/67_queues.sql",
        "v1000/70_cron.sql",
        "v1000/80_restore.sql",
        "v1000/81_timeline.sql",
    ],
}];

/// The schema version this build needs.
pub const LATEST: i32 = MIGRATIONS[MIGRATIONS.len() - 1].version;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_only_grow_and_every_migration_has_sql() {
        assert!(MIGRATIONS.windows(2).all(|two| two[0].version < two[1].version));
        assert!(MIGRATIONS.iter().all(|m| m.version >= FIRST && !m.files.is_empty()));
    }
}
