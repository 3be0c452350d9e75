//! [`Dtype`]: number format of a row, and the loops over rows.
//!
//! Sums are computed in f32, in an order that the caller determines, and rounded once at the end (to nearest, ties to
//! even), so that the same rows give the same bits in every run and on every machine.
//!
//! bf16 is implemented here because the loops must be free of branches for the compiler to vectorise them; f16 is that
//! of `half`, which uses the processor's instructions. fp8 is E4M3 of the OCP specification (no infinities, 448 the
//! largest), with one f32 scale for each 128 numbers.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use moontide_symmetric::RANKS_MAX;
use multiversion::multiversion;

use crate::limits::TOP_K_MAX;

/// Numbers that share a scale in fp8.
pub const FP8_BLOCK: usize = 128;
/// The largest number of E4M3.
const FP8_MAX: f32 = 448.0;
/// Numbers summed at a time: 2 KiB of sums fit into the L1 cache.
const CHUNK: usize = 512;

/// Number format of a row, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits, IEEE.
    F16,
    /// 16 bits, the upper half of an f32.
    Bf16,
    /// 8 bits, E4M3: all numbers of a row, then their scales as f32, one per [`FP8_BLOCK`]. For dispatch only: sums are
    /// not rounded to 8 bits.
    Fp8,
}

impl Dtype {
    /// Returns the bytes of a row of `hidden` numbers.
    pub fn row_bytes(self, hidden: usize) -> usize {
        match self {
            Dtype::F32 => hidden * 4,
            Dtype::F16 | Dtype::Bf16 => hidden * 2,
            Dtype::Fp8 => hidden.next_multiple_of(4) + hidden.div_ceil(FP8_BLOCK) * 4,
        }
    }

    /// Reads a row.
    ///
    /// # Panics
    /// If the length of `row` does not match `numbers`.
    pub fn read(self, row: &[u8], numbers: &mut [f32]) {
        assert_eq!(row.len(), self.row_bytes(numbers.len()));
        match self {
            Dtype::Fp8 => {
                let (values, scales) = row.split_at(numbers.len().next_multiple_of(4));
                let blocks = numbers.chunks_mut(FP8_BLOCK).zip(values.chunks(FP8_BLOCK));
                for ((numbers, values), scale) in blocks.zip(scales.as_chunks().0) {
                    let scale = f32::from_le_bytes(*scale);
                    for (number, &value) in numbers.iter_mut().zip(values) {
                        *number = E4M3[usize::from(value)] * scale;
                    }
                }
            }
            _ => {
                numbers.fill(0.0);
                self.add(row, 1.0, numbers);
            }
        }
    }

    /// Writes a row.
    ///
    /// # Panics
    /// If the length of `row` does not match `numbers`.
    pub fn write(self, numbers: &[f32], row: &mut [u8]) {
        assert_eq!(row.len(), self.row_bytes(numbers.len()));
        match self {
            Dtype::Fp8 => {
                let (values, scales) = row.split_at_mut(numbers.len().next_multiple_of(4));
                let blocks = numbers.chunks(FP8_BLOCK).zip(values.chunks_mut(FP8_BLOCK));
                for ((numbers, values), scale_bytes) in blocks.zip(scales.as_chunks_mut().0) {
                    let largest = numbers.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                    let scale = if largest > 0.0 { largest / FP8_MAX } else { 1.0 };
                    for (value, number) in values.iter_mut().zip(numbers) {
                        *value = to_e4m3(number / scale);
                    }
                    *scale_bytes = scale.to_le_bytes();
                }
            }
            _ => self.round(numbers, row),
        }
    }

    /// Adds a row, times `weight`, to the sums. `row` may be a part of a row.
    fn add(self, row: &[u8], weight: f32, sums: &mut [f32]) {
        match self {
            Dtype::F32 => add_f32(row, weight, sums),
            Dtype::Bf16 => add_bf16(row, weight, sums),
            Dtype::F16 => {
                let mut halves = [f16::ZERO; CHUNK];
                let mut numbers = [0f32; CHUNK];
                for (row, sums) in row.chunks(CHUNK * 2).zip(sums.chunks_mut(CHUNK)) {
                    let (halves, numbers) = (&mut halves[..sums.len()], &mut numbers[..sums.len()]);
                    for (half, bytes) in halves.iter_mut().zip(row.as_chunks().0) {
                        *half = f16::from_le_bytes(*bytes);
                    }
                    halves.convert_to_f32_slice(numbers);
                    for (sum, number) in sums.iter_mut().zip(numbers) {
                        *sum += weight * *number;
                    }
                }
            }
            Dtype::Fp8 => unreachable!("fp8 is not summed"),
        }
    }

    /// Rounds the sums and writes them to `row`.
    fn round(self, sums: &[f32], row: &mut [u8]) {
        match self {
            Dtype::F32 => {
                for (bytes, sum) in row.as_chunks_mut().0.iter_mut().zip(sums) {
                    *bytes = sum.to_le_bytes();
                }
            }
            Dtype::Bf16 => round_bf16(sums, row),
            Dtype::F16 => {
                for (bytes, sum) in row.as_chunks_mut().0.iter_mut().zip(sums) {
                    *bytes = f16::from_f32(*sum).to_le_bytes();
                }
            }
            Dtype::Fp8 => unreachable!("fp8 is not summed"),
        }
    }

    /// Computes the weighted sum of rows of this dtype, in their order; zeros if there are none.
    pub(crate) fn weighted_sum<'r>(
        self,
        rows: impl Iterator<Item = (f32, &'r [u8])> + Clone,
        hidden: usize,
        out: &mut [u8],
    ) {
        let size = self.row_bytes(1);
        assert_eq!(out.len(), hidden * size);
        // bf16, the most common dtype, has its own loop for whole blocks; the general loop handles the rest of a row.
        let done = if self == Dtype::Bf16 { sum_blocks_of_bf16(rows.clone(), out) } else { 0 };
        let mut sums = [0f32; CHUNK];
        for (at, out) in (done..).step_by(CHUNK).zip(out[done * size..].chunks_mut(CHUNK * size)) {
            let sums = &mut sums[..out.len() / size];
            sums.fill(0.0);
            for (weight, row) in rows.clone() {
                self.add(&row[at * size..][..out.len()], weight, sums);
            }
            self.round(sums, out);
        }
    }

    /// Computes the sum of rows, in their order; zeros if there are none. A source uses it to combine results.
    pub fn sum<'r>(self, rows: impl Iterator<Item = &'r [u8]> + Clone, hidden: usize, out: &mut [u8]) {
        self.weighted_sum(rows.map(|row| (1.0, row)), hidden, out);
    }
}

/// Numbers summed side by side: their sums stay in registers, for any number of rows.
const LANES: usize = 64;

/// Sums the whole blocks of rows, and returns their number of numbers.
fn sum_blocks_of_bf16<'r>(rows: impl Iterator<Item = (f32, &'r [u8])>, out: &mut [u8]) -> usize {
    let mut list = [(0f32, &[][..]); SUMMANDS_MAX];
    let mut count = 0;
    for row in rows {
        list[count] = row;
        count += 1;
    }
    let (blocks, _) = out.as_chunks_mut();
    sum_bf16(&list[..count], blocks);
    blocks.len() * LANES
}

/// Most rows of a sum: a token's experts, or one per rank.
const SUMMANDS_MAX: usize = if TOP_K_MAX > RANKS_MAX { TOP_K_MAX } else { RANKS_MAX };

#[multiversion(targets("x86_64+avx2+avx512f+avx512vl+avx512bw", "x86_64+avx2"))]
fn sum_bf16(rows: &[(f32, &[u8])], out: &mut [[u8; 2 * LANES]]) {
    for (block, out) in out.iter_mut().enumerate() {
        let mut sums = [0f32; LANES];
        for (weight, row) in rows {
            let numbers = &row[block * 2 * LANES..][..2 * LANES];
            for (sum, bytes) in sums.iter_mut().zip(numbers.as_chunks().0) {
                *sum += weight * f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        for (bytes, sum) in out.as_chunks_mut().0.iter_mut().zip(sums) {
            *bytes = to_bf16(sum).to_le_bytes();
        }
    }
}

#[multiversion(targets("x86_64+avx2+avx512f+avx512vl+avx512bw", "x86_64+avx2"))]
fn add_f32(row: &[u8], weight: f32, sums: &mut [f32]) {
    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks().0) {
        *sum += weight * f32::from_le_bytes(*bytes);
    }
}

#[multiversion(targets("x86_64+avx2+avx512f+avx512vl+avx512bw", "x86_64+avx2"))]
fn add_bf16(row: &[u8], weight: f32, sums: &mut [f32]) {
    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks().0) {
        *sum += weight * f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

#[multiversion(targets("x86_64+avx2+avx512f+avx512vl+avx512bw", "x86_64+avx2"))]
fn round_bf16(sums: &[f32], row: &mut [u8]) {
    for (bytes, sum) in row.as_chunks_mut().0.iter_mut().zip(sums) {
        *bytes = to_bf16(*sum).to_le_bytes();
    }
}

/// Rounds to nearest, ties to even. A NaN stays a NaN, also if its upper half alone would be an infinity.
#[inline(always)]
fn to_bf16(number: f32) -> u16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16; // wraps for NaN only
    (if number.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// Value of each of the 256 codes.
static E4M3: [f32; 256] = {
    let mut table = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0, // 2⁻⁶ × mantissa / 8
            // An f32 with the same fields: its exponent is biased by 127, that of E4M3 by 7.
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        table[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    table
};

/// Returns the nearest number, ties to even; numbers above the largest become the largest.
fn to_e4m3(number: f32) -> u8 {
    let sign = (number.to_bits() >> 24) as u8 & 0x80;
    let magnitude = number.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    let code = if magnitude < 1.0 / 64.0 {
        // Below the smallest normal number the steps are 2⁻⁹.
        (magnitude * 512.0).round_ties_even() as u32
    } else {
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
        (rounded >> 20).saturating_sub(120 << 3)
    };
    sign | code.min(0x7e) as u8
}

/// Converts numbers to bf16.
pub fn bf16_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|&number| bf16::from_f32(number).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers of every kind: all upper halves, each with lower halves at and next to a tie.
    fn sample() -> Vec<f32> {
        let bits = (0..=u16::MAX).flat_map(|upper| {
            [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| u32::from(upper) << 16 | lower)
        });
        bits.map(f32::from_bits).collect()
    }

    #[test]
    fn bf16_rounding_matches_half_crate() {
        let numbers = sample();
        let mut row = vec![0; numbers.len() * 2];
        round_bf16(&numbers, &mut row);
        for (number, bytes) in numbers.iter().zip(row.as_chunks().0) {
            let (found, expected) = (bf16::from_le_bytes(*bytes), bf16::from_f32(*number));
            assert_eq!(found.to_bits(), expected.to_bits(), "{number:e} ({:#x})", number.to_bits());
        }
    }

    #[test]
    fn fp8_rounds_to_nearest_even() {
        for (code, &number) in E4M3.iter().enumerate().filter(|(_, number)| !number.is_nan()) {
            assert_eq!(usize::from(to_e4m3(number)), code, "{number}");
        }
        assert_eq!(E4M3[0x7e], FP8_MAX);
        // Between two neighbours: the nearer one, and of two equally near ones the even one.
        for code in 0..0x7eusize {
            let (low, high) = (E4M3[code], E4M3[code + 1]);
            let middle = (low + high) / 2.0;
            let even = code + code % 2;
            assert_eq!(usize::from(to_e4m3(middle)), even, "{middle}");
            assert_eq!(usize::from(to_e4m3(middle.next_down())), code);
            assert_eq!(usize::from(to_e4m3(-middle.next_up())), (code + 1) | 0x80);
        }
        assert_eq!(to_e4m3(1e9), 0x7e);
        assert!(E4M3[usize::from(to_e4m3(f32::NAN))].is_nan());
    }

    #[test]
    fn rows_round_trip_within_dtype_precision() {
        let numbers: Vec<f32> = (0..300).map(|n| (n as f32 - 150.0) * 0.37).collect();
        for (dtype, worst) in
            [(Dtype::F32, 0.0), (Dtype::F16, 1e-3), (Dtype::Bf16, 4e-3), (Dtype::Fp8, 0.0626)]
        {
            let mut row = vec![0; dtype.row_bytes(numbers.len())];
            dtype.write(&numbers, &mut row);
            let mut back = vec![f32::NAN; numbers.len()];
            dtype.read(&row, &mut back);
            for (number, back) in numbers.iter().zip(&back) {
                // Near zero the scale of a block limits the precision.
                let allowed = number.abs().max(1.0) * worst;
                assert!((number - back).abs() <= allowed, "{dtype:?}: {number} became {back}");
            }
        }
    }

    #[test]
    fn bf16_sum_accumulates_in_order_and_rounds_once() {
        let rows: Vec<Vec<u8>> =
            [1.0, 0.00390625, 0.00390625].map(|number| bf16_bytes(&vec![number; 1000])).into_iter().collect();
        let mut out = vec![0; 2000];
        Dtype::Bf16.sum(rows.iter().map(Vec::as_slice), 1000, &mut out);
        // Rounded after each addition it would still be 1.
        assert_eq!(out, bf16_bytes(&vec![1.0078125; 1000]));
        // The loop for blocks gives the same as the general loop, which handles the last 40 of 1000 numbers.
        let numbers: Vec<f32> = (0..1000).map(|n| (n as f32 - 500.0) * 0.013).collect();
        let odd = [bf16_bytes(&numbers), rows[0].clone(), bf16_bytes(&numbers)];
        let weighted = odd.iter().zip([0.3, -0.7, 1.9]).map(|(row, weight)| (weight, &row[..]));
        Dtype::Bf16.weighted_sum(weighted.clone(), 1000, &mut out);
        let mut sums = vec![0f32; 1000];
        weighted.for_each(|(weight, row)| add_bf16(row, weight, &mut sums));
        assert_eq!(out, bf16_bytes(&sums));
        Dtype::Bf16.weighted_sum([(0.5, &rows[0][..])].into_iter(), 1000, &mut out);
        assert_eq!(out, bf16_bytes(&vec![0.5; 1000]));
        Dtype::Bf16.sum([].into_iter(), 1000, &mut out);
        assert_eq!(out, vec![0; 2000]);
    }
}
