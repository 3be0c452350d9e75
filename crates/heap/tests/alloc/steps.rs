//! Decodes bytes as steps for the [`Model`]: the body of a fuzz target, and of the replay of its corpus.
//!
//! ```text
//!   capacity: u16 le │ step │ step │ …          step = kind: u8, then operands, least significant byte first
//!
//!   kind % 8   0 1 2   allocate    size: u8     1 + (size << kind / 8 % 8) units; page-aligned if kind >= 128
//!              3 4 5   free        rank: u16
//!              6       tag         rank: u8, tag: u32; or, if kind >= 128, rebuild
//!              7       claim       start: u16, units: u8 << (kind / 8 % 8)
//! ```
//!
//! Every input is valid: an incomplete step ends the run.

use std::num::NonZeroU32;

use moontide_heap::alloc::Align;
use moontide_types::Extent;

use super::model::{Model, Op};

/// Maximum number of steps of one input. Comparing takes time in proportion to the number of blocks, so more would
/// slow down the fuzzer.
const STEPS_MAX: usize = 512;

/// Runs the steps encoded in `data`.
pub(crate) fn run_steps(data: &[u8]) {
    let mut bytes = Bytes(data);
    let Some(capacity) = bytes.take::<2>() else { return };
    let mut model = Model::new(u32::from(u16::from_le_bytes(capacity)));
    for op in std::iter::from_fn(|| bytes.op()).take(STEPS_MAX) {
        model.step(op);
    }
    model.finish();
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (&taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(taken)
    }

    fn op(&mut self) -> Option<Op> {
        let [kind] = self.take()?;
        let (shift, high) = (kind / 8 % 8, kind >= 128);
        Some(match kind % 8 {
            0..=2 => {
                let [size] = self.take()?;
                let units = NonZeroU32::MIN.saturating_add(u32::from(size) << shift);
                Op::Alloc { units, align: if high { Align::Page } else { Align::Unit } }
            }
            3..=5 => Op::Free { rank: u16::from_le_bytes(self.take()?).into() },
            6 if high => Op::Rebuild,
            6 => {
                let [rank] = self.take()?;
                Op::Tag { rank: rank.into(), tag: u32::from_le_bytes(self.take()?) }
            }
            _ => {
                let start = u16::from_le_bytes(self.take()?).into();
                let [units] = self.take()?;
                Op::Claim { extent: Extent { start, units: u32::from(units) << shift } }
            }
        })
    }
}
