//! Shared-memory engine: a process on the host of a node maps the memory of the node instead of requesting bytes.
//!
//! A process connects to the node's Unix socket (see `ShmListener` of `moontide_heap`), which checks its credentials
//! and passes the descriptors. From then on a get is a pin and one copy, or no copy at all
//! ([`Link::local`](crate::Link::local)). A put is Begin, claim, copy, Commit, where Begin and Commit are frames over a
//! stream that the process opened at that socket, so that the node knows the sender.
//!
//! | file | content |
//! |---|---|
//! | `link` | client: attaches, gets and puts |
//! | `server` | node: listener, streams, and detection of client exits |

mod link;
mod server;

pub use link::{ShmConfig, ShmEngine, ShmLink};
pub use server::{ShmServer, ShmServerConfig, ShmServerError};

use std::path::{Path, PathBuf};

/// Returns the shm address of a node on this host: the id of the current boot, and the path of the socket.
pub fn address(socket: &Path) -> Option<String> {
    Some(format!("{}:{}", this_boot()?, socket.to_str()?))
}

/// Returns the socket of an address, if the address belongs to the current boot of this host.
fn socket_of(address: &str) -> Option<PathBuf> {
    let (boot, path) = address.split_once(':')?;
    (boot == this_boot()?).then(|| PathBuf::from(path))
}

/// Returns the id of the current boot, which no other boot of any host shares.
fn this_boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_another_boot_is_rejected() {
        let address = address(Path::new("/run/moontide/node:1.sock")).unwrap();
        assert_eq!(socket_of(&address), Some(PathBuf::from("/run/moontide/node:1.sock")));
        assert_eq!(socket_of("6f1c1f5e-0000-0000-0000-000000000000:/run/moontide/node.sock"), None);
        assert_eq!(socket_of("nonsense"), None);
    }
}
