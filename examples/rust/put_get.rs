//! Puts an object, gets it back, replaces it and removes it.
//!
//! ```text
//! moontide dev &                                             # a cluster on this machine
//! cargo run -p moontide-client --example put_get             # MOONTIDE_MASTER names another master
//! ```
//!
//! A get returns exactly the bytes of a put that was acknowledged, or `None`. A put does not replace an existing object
//! unless the options say so: two inference engines that compute the same block produce the same bytes.

#![forbid(unsafe_code)]

use moontide_client::{PutOptions, PutOutcome, Store, StoreConfig, StoreError};

const KEY: &[u8] = b"examples/put_get";

fn main() -> Result<(), StoreError> {
    let master = std::env::var("MOONTIDE_MASTER").unwrap_or_else(|_| "127.0.0.1:7400".to_owned());
    // One store per process is enough: threads share it.
    let store = Store::connect(StoreConfig::new(master))?;
    // Left over if an earlier run failed. `true`: also if it is leased or pinned.
    store.remove(KEY, true)?;

    assert_eq!(store.put(KEY, b"keys and values")?, PutOutcome::Stored);
    assert_eq!(store.put(KEY, b"something else")?, PutOutcome::AlreadyExists);
    let bytes = store.get(KEY)?.expect("the object was put");
    assert_eq!(&bytes[..], b"keys and values");

    // Replaces the object. The value may consist of several buffers, which are not joined first.
    let replace = PutOptions { upsert: true, ..PutOptions::default() };
    store.put_with(KEY, &[b"new keys", b" and new values"], &replace)?;
    let mut buffer = [0; 64];
    let len = store.get_into(KEY, &mut buffer)?.expect("the object was put");
    assert_eq!(&buffer[..len], b"new keys and new values");

    // `true`: the object existed. No get that starts afterwards finds it, in any process.
    assert!(store.remove(KEY, false)?);
    assert!(store.get(KEY)?.is_none());
    println!("put, get, replace and remove: ok");
    Ok(())
}
