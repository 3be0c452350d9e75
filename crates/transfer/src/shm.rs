//! Shared memory: a node on the same host is not asked for bytes, they are there.
//!
//! A process joins at the node's door (a Unix socket; see `moontide_heap`'s `Door`), which checks who it is and passes
//! the descriptors. From then on a get is a pin and one copy, or no copy at all ([`Link::local`](crate::Link::local));
//! a put is Begin, claim, copy, Commit, where Begin and Commit are frames over a stream that the process opened at the
//! door, so that the node knows who speaks.
//!
//! | file | what |
//! |---|---|
//! | `link` | a process of the host: joining, gets and puts |
//! | `host` | the node: the door, streams, and who has died |

mod host;
mod link;

pub use host::{Host, HostConfig, HostError};
pub use link::{ShmConfig, ShmEngine, ShmLink};

use std::path::{Path, PathBuf};

/// How a node on this host announces its door: the boot that it belongs to, and the socket's path.
pub fn address(door: &Path) -> Option<String> {
    Some(format!("{}:{}", this_boot()?, door.to_str()?))
}

/// The door behind an address, if it belongs to this boot of this host.
fn door_of(address: &str) -> Option<PathBuf> {
    let (boot, path) = address.split_once(':')?;
    (boot == this_boot()?).then(|| PathBuf::from(path))
}

/// What tells this boot of this host from all others.
fn this_boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_of_one_boot() {
        let address = address(Path::new("/run/moontide/node:1.sock")).unwrap();
        assert_eq!(door_of(&address), Some(PathBuf::from("/run/moontide/node:1.sock")));
        assert_eq!(door_of("6f1c1f5e-0000-0000-0000-000000000000:/run/moontide/node.sock"), None);
        assert_eq!(door_of("nonsense"), None);
    }
}
