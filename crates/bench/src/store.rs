//! `moontide bench local`, `remote`, `tls`, `load`, `mixed` and `trace`: the store from the view of an application, in a
//! cluster of processes that the benchmark starts, or in an existing cluster.
//!
//! | file | content |
//! |---|---|
//! | `cluster` | processes of the cluster |
//! | `local` | local objects: zero-copy reads, copies, puts |
//! | `remote` | objects over TCP |
//! | `load` | objects on the disk of a node, over TCP or on the same host |
//! | `tls` | what mutual TLS costs gets, puts and look-ups |
//! | `write_back` | what the write of every object to disk costs the puts |
//! | `mixed` | many callers, reads and writes, also under overload |
//! | `replay` | replay of a trace of KV-cache traffic |

mod cluster;
mod load;
mod local;
mod mixed;
mod remote;
mod replay;
mod tls;
mod write_back;

use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_rt::SplitMix64;

use crate::arguments::{seconds, transfer_bytes};

pub(super) use cluster::{BenchCluster, Size};
pub(super) use load::{Args as LoadArgs, EXAMPLES as LOAD_EXAMPLES, run as load};
pub(super) use local::{Args as LocalArgs, EXAMPLES as LOCAL_EXAMPLES, run as local};
pub(super) use mixed::{Args as MixedArgs, EXAMPLES as MIXED_EXAMPLES, run as mixed};
pub(super) use remote::{Args as RemoteArgs, EXAMPLES as REMOTE_EXAMPLES, run as remote};
pub(super) use replay::{Args as ReplayArgs, EXAMPLES as REPLAY_EXAMPLES, run as replay};
pub(super) use tls::{
    Args as TlsArgs, EXAMPLES as TLS_EXAMPLES, ServerArgs as TlsServerArgs, run as tls,
    run_server as tls_server,
};
pub(super) use write_back::{Args as WriteBackArgs, EXAMPLES as WRITE_BACK_EXAMPLES, run as write_back};

/// Common arguments of `local`, `remote`, `tls`, `load` and `write-back`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct BenchEffort {
    /// Repeats of store and baseline [default: 5; quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// Duration of one measurement in seconds [default: 0.3; quick: 0.05]
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    /// Object sizes, in bytes or with suffix K or M [default: 64K,256K,1M,4M,16M; quick: 256K,4M]
    #[arg(long, value_delimiter = ',', value_parser = transfer_bytes)]
    sizes: Option<Vec<u64>>,
    /// Seed of the order of objects
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use fewer sizes, and fewer and shorter measurements
    #[arg(long)]
    quick: bool,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

impl BenchEffort {
    fn repeats(&self) -> u64 {
        self.repeats.unwrap_or(if self.quick { 3 } else { 5 }).into()
    }

    fn span(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { 0.05 } else { 0.3 }))
    }

    fn sizes(&self) -> Vec<u64> {
        let default: &[u64] = if self.quick {
            &[256 << 10, 4 << 20]
        } else {
            &[64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
        };
        self.sizes.clone().unwrap_or_else(|| default.to_vec())
    }

    /// Total bytes of the objects for random reads: more than any CPU cache.
    fn set_bytes(&self) -> u64 {
        if self.quick { 256 << 20 } else { 1 << 30 }
    }
}

/// Returns random bytes.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = SplitMix64::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
