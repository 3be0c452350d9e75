//! Gets the blocks of a prompt in one call. Some of them do not exist.
//!
//! ```text
//! moontide dev &                                             # a cluster on this machine
//! cargo run -p moontide-client --example batch_get           # MOONTIDE_MASTER names another master
//! ```
//!
//! A batch of n keys is much cheaper than n calls. Results have the order of the keys. A missing object is `Ok(None)`,
//! and an `Err` concerns its key alone: the other results are valid.

#![forbid(unsafe_code)]

use moontide_client::{GetInto, PutItem, PutOptions, Store, StoreConfig, StoreError};

const BLOCK_BYTES: usize = 4096;

fn main() -> Result<(), StoreError> {
    let master = std::env::var("MOONTIDE_MASTER").unwrap_or_else(|_| "127.0.0.1:7400".to_owned());
    let store = Store::connect(StoreConfig::new(master))?;
    // The keys of a prompt of eight blocks. An earlier request has stored the first five.
    let names: Vec<String> = (0..8).map(|block| format!("examples/batch_get/{block}")).collect();
    let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    // Left over if an earlier run failed.
    store.remove_batch(&keys, true);
    let blocks: Vec<Vec<u8>> = (0..5).map(|block| vec![block; BLOCK_BYTES]).collect();
    let parts: Vec<[&[u8]; 1]> = blocks.iter().map(|block| [&block[..]]).collect();
    let items: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
    for outcome in store.put_batch(&items, &PutOptions::default()) {
        outcome?;
    }

    // How much of the prompt is cached? Only a prefix is useful: a block depends on all blocks before it.
    let cached = store.exists_batch(&keys).iter().take_while(|exists| matches!(exists, Ok(true))).count();
    assert_eq!(cached, 5);

    // Copies into memory of the caller, here one buffer for all blocks. An object may disappear between two
    // calls, so every result is checked; `None` is a block to compute.
    let mut memory = vec![0; keys.len() * BLOCK_BYTES];
    let buffers = memory.chunks_exact_mut(BLOCK_BYTES);
    let mut wanted: Vec<GetInto<'_>> =
        keys.iter().zip(buffers).map(|(key, into)| GetInto { key, into }).collect();
    let mut missing = Vec::new();
    for (block, result) in store.get_batch_into(&mut wanted).into_iter().enumerate() {
        match result? {
            Some(len) => assert_eq!(len, BLOCK_BYTES),
            None => missing.push(block),
        }
    }
    assert_eq!(missing, [5, 6, 7]);
    assert_eq!(memory[4 * BLOCK_BYTES..5 * BLOCK_BYTES], blocks[4]);

    // Without own memory: one `Bytes` per object.
    let found = store.get_batch(&keys);
    assert!(matches!(&found[0], Ok(Some(bytes)) if bytes[..] == blocks[0]));
    assert!(matches!(&found[7], Ok(None)));

    // `Ok(true)` for each object that existed.
    let removed = store.remove_batch(&keys, true);
    assert_eq!(removed.iter().filter(|result| matches!(result, Ok(true))).count(), 5);
    println!("{cached} blocks found, {} to compute: ok", missing.len());
    Ok(())
}
