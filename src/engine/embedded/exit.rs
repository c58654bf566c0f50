//! Stops servers that live as long as the process, since statics are not dropped when it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once, PoisonError};

use super::Embedded;

static LEAKED: Mutex<Vec<&'static Embedded>> = Mutex::new(Vec::new());
static REGISTER: Once = Once::new();

pub(super) fn stop_at_exit(embedded: &'static Embedded) {
    LEAKED.lock().unwrap_or_else(PoisonError::into_inner).push(embedded);
    // SAFETY: the handler is a plain function that does not unwind.
    REGISTER.call_once(|| unsafe {
        nix::libc::atexit(stop_all);
    });
}

/// Runs at `exit` and after `main`. A process that ends by a signal does not come here: then the kernel has the
/// postmaster stop, and the next start removes its folder.
extern "C" fn stop_all() {
    let leaked = std::mem::take(&mut *LEAKED.lock().unwrap_or_else(PoisonError::into_inner));
    for embedded in leaked {
        let _ = catch_unwind(AssertUnwindSafe(|| embedded.shut_down()));
    }
}
