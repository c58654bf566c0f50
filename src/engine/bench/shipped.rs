//! The scenarios of the folder `scenarios/`, in the binary.

/// A scenario by the name of its file.
#[derive(Debug, Clone, Copy)]
pub struct Shipped {
    pub name: &'static str,
    pub text: &'static str,
}

macro_rules! shipped {
    ($name:literal) => {
        Shipped { name: $name, text: include_str!(concat!("../../../scenarios/", $name, ".yaml")) }
    };
}

pub const SHIPPED: &[Shipped] = &[
    shipped!("abort-storm"),
    shipped!("backlog-depth"),
    shipped!("held-producer"),
    shipped!("idle-writer"),
    shipped!("mixed-idle-writer"),
    shipped!("pickup-5000"),
    shipped!("pickup-latency"),
    shipped!("throughput-1x256"),
    shipped!("throughput-1x32"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::bench::Scenario;

    #[test]
    fn every_file_of_the_folder_is_in_the_binary_under_its_name() {
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios")).unwrap();
        let mut files: Vec<String> = folder.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        let names: Vec<String> = SHIPPED.iter().map(|shipped| format!("{}.yaml", shipped.name)).collect();
        assert_eq!(files, names);
        for shipped in SHIPPED {
            assert_eq!(Scenario::parse(shipped.text, shipped.name).unwrap().name, shipped.name);
        }
    }
}
