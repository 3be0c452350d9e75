//! Expert-parallel exchange between the processes of one host.
//!
//! In a mixture of experts every token is worked on by a few experts, and every rank has some of the experts. In one
//! step each rank sends its tokens to where their experts are (**dispatch**), works on what it got, and gets back the sum
//! of what the experts made of its own tokens (**combine**). Nobody is asked and nothing is copied twice: a rank
//! writes straight into the memory of the others, in slots that are its own, and phase numbers say when.
//!
//! Reading order: [`layout`](Shape) (what lies where), [`tokens`](Tokens), `places` (who may touch what when),
//! [`route`](Hit) (from slots to experts), [`channel`](Channel), [`step`](Sent) (a step as types), [`record`](Recording),
//! [`numbers`](Dtype). How ranks wait for each other is heap's [`PhaseBarrier`](moontide_heap::PhaseBarrier).
//!
//! # A step of a world of one
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use moontide_ep::*;
//! use moontide_heap::{HugePages, Rank, World, WorldConfig, WorldShape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = Shape {
//!     ranks: 1,
//!     tokens_max: 4,
//!     hidden: 8,
//!     top_k: 2,
//!     experts_per_rank: 4,
//!     send: Dtype::F32,
//!     back: Dtype::F32,
//!     buffers: Buffers::One,
//!     returns: Returns::Pull,
//! };
//! let timeout = Duration::from_secs(5);
//! let world = WorldConfig {
//!     path: std::env::temp_dir().join(format!("moontide-ep-example-{}", std::process::id())),
//!     rank: Rank(0),
//!     shape: WorldShape { ranks: 1, bytes: shape.bytes()?.next_multiple_of(4096) },
//!     huge: HugePages::IfAllowed,
//!     timeout,
//! };
//! // SAFETY: all ranks are this program.
//! let world = Arc::new(unsafe { World::join(&world) }?);
//! // SAFETY: nothing else lies in these regions.
//! let mut channel = unsafe { Channel::open(&world, 0, shape, timeout) }?;
//!
//! // One token of ones, for experts 0 and 3. Expert e multiplies by e + 1.
//! let row: Vec<u8> = [1f32; 8].iter().flat_map(|number| number.to_le_bytes()).collect();
//! let tokens = Tokens { rows: &row, experts: &[0, 3], weights: &[0.5, 0.25] };
//! let mut results = vec![0; row.len()];
//! channel.moe_forward(tokens, &mut results, timeout, |received| {
//!     assert_eq!(received.rows_per_expert(), [1, 0, 0, 1]);
//!     received.for_each(|work| {
//!         let mut numbers = [0f32; 8];
//!         Dtype::F32.read(work.row, &mut numbers);
//!         let factor: f32 = work.hits.iter().map(|hit| hit.weight * (hit.expert + 1) as f32).sum();
//!         Dtype::F32.write(&numbers.map(|number| number * factor), work.back);
//!     });
//! })?;
//! let mut sums = [0f32; 8];
//! Dtype::F32.read(&results, &mut sums);
//! assert_eq!(sums, [1.5; 8]); // 0.5 × 1 + 0.25 × 4
//! # Ok(())
//! # }
//! ```

mod layout;
mod tokens;

mod places;
mod route;

mod channel;
mod step;

mod record;

mod numbers;

pub use channel::{Channel, OpenError};
pub use layout::{Buffers, GROUPED_ROWS_MAX, Returns, Shape, ShapeError, TOP_K_MAX};
pub use numbers::{Dtype, FP8_BLOCK, bf16_bytes};
pub use record::{Input, Recording};
pub use route::Hit;
pub use step::{Block, Crossed, InStep, Late, Received, Returned, Sent, StepError, Summed, UnderWay, Work};
pub use tokens::{SendError, Tokens};
