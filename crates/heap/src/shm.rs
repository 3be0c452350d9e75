//! The protocol in shared memory: regions, and what lies in them.
//!
//! | file | what |
//! |---|---|
//! | `region` | memfds: making, sealing, importing, mapping |
//! | `fork` | telling a mapping of this process from one that a fork took away |
//! | `board` | the node's page and the index |
//! | `ledger` | a client's cells, counts and touch bits; all ledgers of a node |
//! | `reads` | what a client's threads have read in place |
//! | `segment` | header table and payload |
//! | `fill` | payload and digests into a record |
//! | `trailer` | what stands behind them: tenant, key and attributes |
//! | `grant` | what may be put where, and why not |
//! | `draft` | a record's header and trailer before they are written |
//! | `owner` | one segment: begin, commit, kill, reclaim |
//! | `node_heap` | the node: board, ledgers, segments, its own pins |
//! | `staging` | a segment of the node's own, into which records are read from disk |
//! | `local` | a client: get in place, claim and fill |
//! | `shared` | the same without lifetimes: readers and guards that keep the heap alive |
//! | `message`, `door` | how a client gets in: greeting, descriptors, credentials |
//! | `death` | how the node learns that a client has ended |
//! | `posts` | the posts of a barrier in shared memory; spinning, sleeping and waking |
//! | `world`, `rendezvous` | the symmetric heap: ranks that map each other's regions, and how they meet |

mod board;
mod death;
mod door;
mod draft;
mod fill;
mod fork;
mod grant;
mod ledger;
mod local;
mod message;
mod node_heap;
mod owner;
mod posts;
mod reads;
mod region;
mod rendezvous;
mod segment;
mod shared;
mod staging;
mod trailer;
mod world;

pub use board::{Board, BoardError, BoardView};
pub use death::{DeathWatch, Ended, WatchError};
pub use door::{Door, DoorError, Said, Visitor, join, offer_segment, open_stream};
pub use fill::with_helpers;
pub use fork::{PerProcess, ProcessToken};
pub use grant::{BeginError, CommitError, Freed, Grant, Killed, NewRecord, Reclaimed, StageError, Writer};
pub use ledger::{
    CLIENTS_MAX, ClientLedger, GROUPS_PER_LEDGER, JOINS_PER_PROCESS_MAX, LedgerError, Ledgers, OwnCells, Pins,
};
pub use local::{
    AttachError, Guard, LocalHeap, Lookup, NoStay, Reader, SEGMENTS_MAPPED_MAX, Stay, WriteClaim,
};
pub use message::{Message, MessageError, Welcome};
pub use node_heap::{HeapConfig, NodeClaim, NodeHeap, NodePin};
pub use owner::Segment;
pub use posts::{Patience, RegionPosts, SPINS_UNTIL_DEADLINE};
pub use reads::LocalReads;
pub use region::{HugePages, Protection, Region, RegionError};
pub use segment::{Medium, SegmentError, SegmentShape};
pub use shared::{Committing, KernelCell, SharedClaim, SharedGuard, SharedLookup, SharedReader, SharedStay};
pub use staging::{Staged, Staging, StagingRoom, StagingUse, Unpublished};
pub use trailer::Trailer;
pub use world::{RankProcess, World, WorldConfig, WorldError, WorldShape};

#[cfg(test)]
#[path = "../../types/tests/page/mod.rs"]
mod page;

/// The fields of a `repr(C)` struct, for comparing with the page that draws them.
#[cfg(test)]
macro_rules! fields_of {
    ($struct:ident: $($field:ident),*) => {{
        // Each field reaches up to the next one: the structs have no padding, says their size.
        let offsets = [$((std::mem::offset_of!($struct, $field), stringify!($field)),)*];
        let ends = offsets.iter().skip(1).map(|&(offset, _)| offset).chain([size_of::<$struct>()]);
        let field = |((offset, name), end): ((usize, &'static str), usize)| {
            moontide_types::record::Field { offset, bytes: end - offset, name }
        };
        offsets.into_iter().zip(ends).map(field).collect::<Vec<_>>()
    }};
}
#[cfg(test)]
pub(crate) use fields_of;
