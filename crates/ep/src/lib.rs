//! Expert-parallel exchange between the processes of one host.
//!
//! In a mixture of experts, a few experts process every token, and every rank has some of the experts. In one step each
//! rank sends its tokens to the ranks of their experts (**dispatch**), processes the tokens that it received, and gets
//! the sum of the experts' results for its own tokens (**combine**). There are no requests and no second copy: a rank
//! writes directly into the memory of the others, in slots that only it writes, and a phase barrier orders the
//! accesses.
//!
//! Reading order: [`layout`](ChannelConfig) (offsets in a region), [`tokens`](Tokens), `memory` (access rules),
//! [`route`](ExpertAssignment) (slots to experts), [`channel`](Channel), [`step`](Dispatching) (a step as types),
//! [`recording`](Recording), [`dtype`](Dtype). Ranks wait for each other with
//! [`PhaseBarrier`](moontide_symmetric::PhaseBarrier) of `moontide-symmetric`.
//!
//! # A step of a world of one
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use moontide_ep::*;
//! use moontide_heap::HugePages;
//! use moontide_symmetric::{Rank, World, WorldConfig, WorldShape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = ChannelConfig {
//!     ranks: 1,
//!     tokens_max: 4,
//!     hidden: 8,
//!     top_k: 2,
//!     experts_per_rank: 4,
//!     dispatch_dtype: Dtype::F32,
//!     combine_dtype: Dtype::F32,
//!     buffering: Buffering::Single,
//!     combine_mode: CombineMode::Pull,
//! };
//! let timeout = Duration::from_secs(5);
//! let world = WorldConfig {
//!     path: std::env::temp_dir().join(format!("moontide-ep-example-{}", std::process::id())),
//!     rank: Rank(0),
//!     shape: WorldShape { ranks: 1, bytes: config.bytes()?.next_multiple_of(4096) },
//!     huge: HugePages::Auto,
//!     timeout,
//! };
//! // SAFETY: all ranks are this program.
//! let world = Arc::new(unsafe { World::join(&world) }?);
//! // SAFETY: the channel is alone in these regions.
//! let mut channel = unsafe { Channel::open(&world, 0, config, timeout) }?;
//!
//! // One token of ones, for experts 0 and 3. Expert e multiplies by e + 1.
//! let row: Vec<u8> = [1f32; 8].iter().flat_map(|number| number.to_le_bytes()).collect();
//! let tokens = Tokens { rows: &row, experts: &[0, 3], weights: &[0.5, 0.25] };
//! let mut results = vec![0; row.len()];
//! channel.moe_forward(tokens, &mut results, timeout, |dispatched| {
//!     assert_eq!(dispatched.rows_per_expert(), [1, 0, 0, 1]);
//!     dispatched.for_each(|input| {
//!         let mut numbers = [0f32; 8];
//!         Dtype::F32.read(input.row, &mut numbers);
//!         let factor: f32 = input.hits.iter().map(|hit| hit.weight * (hit.expert + 1) as f32).sum();
//!         Dtype::F32.write(&numbers.map(|number| number * factor), input.output);
//!     });
//! })?;
//! let mut sums = [0f32; 8];
//! Dtype::F32.read(&results, &mut sums);
//! assert_eq!(sums, [1.5; 8]); // 0.5 × 1 + 0.25 × 4
//! # Ok(())
//! # }
//! ```

mod layout;
mod limits;
mod tokens;

mod memory;
mod route;

mod channel;
mod step;

mod recording;

mod dtype;

pub use channel::{Channel, OpenError};
pub use dtype::{Dtype, FP8_BLOCK, bf16_bytes};
pub use layout::{Buffering, ChannelConfig, ChannelConfigError, CombineMode};
pub use limits::{GROUPED_ROWS_MAX, TOP_K_MAX};
pub use recording::{LayerInput, Recording};
pub use route::ExpertAssignment;
pub use step::{
    CombineReport, Combining, Dispatched, Dispatching, ExpertInput, Overlapped, SourceRows, StepError,
    StepInProgress, StepStage, StepTimeout,
};
pub use tokens::{DispatchError, Tokens};
