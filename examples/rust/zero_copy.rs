//! Reads an object in the memory of a node on the same host, without a copy and without a call.
//!
//! ```text
//! moontide dev &                                             # a cluster on this machine
//! cargo run -p moontide-client --example zero_copy           # MOONTIDE_MASTER names another master
//! ```
//!
//! `get_ref` finds the object in the node's index in shared memory and pins it. If no local node has the object, it
//! returns a copy instead; `is_zero_copy` tells the two apart. This program fails in that case, to show that it was
//! zero-copy. An application uses the bytes either way.

#![forbid(unsafe_code)]

use std::error::Error;

use moontide_client::{Store, StoreConfig};

const KEY: &[u8] = b"examples/zero_copy";

fn main() -> Result<(), Box<dyn Error>> {
    let master = std::env::var("MOONTIDE_MASTER").unwrap_or_else(|_| "127.0.0.1:7400".to_owned());
    let store = Store::connect(StoreConfig::new(master))?;
    store.remove(KEY, true)?;

    let block: Vec<u8> = (0..600_000_u32).map(|at| at as u8).collect();
    store.put(KEY, &block)?;

    let object = store.get_ref(KEY)?.ok_or("the object was put")?;
    if !object.is_zero_copy() {
        return Err("no node on this host has the object: run this program on the host of a node".into());
    }
    // An `ObjectRef` is a slice. Its bytes are compared with their digest only on request.
    assert!(object.verify());
    assert_eq!(object[..], block[..]);

    // The bytes do not change while the reference exists, even if the object is removed. Drop it soon: until
    // then the node cannot reuse the memory.
    store.remove(KEY, true)?;
    assert!(store.get_ref(KEY)?.is_none());
    assert_eq!(object[..], block[..]);
    drop(object);

    // `try_get_ref` never waits and never calls another process: `None` if no local node has the object.
    assert!(store.try_get_ref(KEY)?.is_none());
    println!("read {} bytes in place: ok", block.len());
    Ok(())
}
