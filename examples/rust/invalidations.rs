//! Follows the objects that leave the store: removed, evicted, expired or lost with a node.
//!
//! ```text
//! moontide dev &                                             # a cluster on this machine
//! cargo run -p moontide-client --example invalidations       # MOONTIDE_MASTER names another master
//! ```
//!
//! A router that knows which engine has which prefix uses this feed to forget blocks that are gone. The feed is a hint,
//! not a log: after a `Gap` some invalidations may be missing, and the program checks its keys again.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use moontide_client::{Invalidation, Store, StoreConfig};

const KEYS: [&[u8]; 2] = [b"examples/invalidations/stays", b"examples/invalidations/leaves"];

fn main() -> Result<(), Box<dyn Error>> {
    let master = std::env::var("MOONTIDE_MASTER").unwrap_or_else(|_| "127.0.0.1:7400".to_owned());
    let store = Store::connect(StoreConfig::new(master))?;
    for key in KEYS {
        store.put(key, b"a block")?;
    }

    // The feed names objects by id, because a master sends no keys.
    let mut known = HashMap::new();
    for key in KEYS {
        known.insert(store.object_id(key)?, key);
    }
    let mut feed = store.invalidations();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut removal_sent = false;
    while known.len() == KEYS.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        for invalidation in feed.next(left).ok_or("no invalidation in time")? {
            match invalidation {
                Invalidation::Removed(id) => {
                    if let Some(key) = known.remove(&id) {
                        println!("{} is gone", String::from_utf8_lossy(key));
                    }
                }
                // The first result is a gap: earlier invalidations are unknown.
                // A program with many keys checks them with `exists_batch`.
                Invalidation::Gap => known.retain(|_, key| store.exists(key).unwrap_or(true)),
            }
        }
        if !removal_sent {
            assert!(store.remove(KEYS[1], true)?);
            removal_sent = true;
        }
    }
    assert!(known.values().eq([&KEYS[0]]));
    store.remove(KEYS[0], true)?;
    println!("the feed reported the removal: ok");
    Ok(())
}
