//! Settings of a channel in Python, and checks of its arrays.

use moontide_ep::{Buffering, ChannelConfig, CombineMode, Dtype};
use moontide_types::tensor;
use pyo3::prelude::*;

use crate::array::{Array, Target};
use crate::errors;

/// Returns the type for a name of torch.
pub(super) fn dtype(what: &str, name: &str) -> PyResult<Dtype> {
    Ok(match name {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::Bf16,
        "float8" | "float8_e4m3fn" => Dtype::Fp8,
        _ => {
            return Err(errors::argument(format!(
                "{what} must be \"float32\", \"float16\", \"bfloat16\" or \"float8\", not {name:?}"
            )));
        }
    })
}

/// Keyword arguments of a channel.
pub(super) struct Settings<'a> {
    pub(super) ranks: usize,
    pub(super) tokens_max: usize,
    pub(super) hidden: usize,
    pub(super) top_k: usize,
    pub(super) experts_per_rank: usize,
    pub(super) dispatch_dtype: &'a str,
    pub(super) combine_dtype: Option<&'a str>,
    pub(super) buffers: usize,
    pub(super) combine_mode: &'a str,
}

impl Settings<'_> {
    pub(super) fn shape(&self) -> PyResult<ChannelConfig> {
        let Settings { ranks, tokens_max, hidden, top_k, experts_per_rank, .. } = *self;
        let dispatch_dtype = dtype("dispatch_dtype", self.dispatch_dtype)?;
        let combine_dtype = match self.combine_dtype {
            Some(name) => dtype("combine_dtype", name)?,
            None if dispatch_dtype == Dtype::Fp8 => Dtype::Bf16,
            None => dispatch_dtype,
        };
        let buffering = match self.buffers {
            1 => Buffering::Single,
            2 => Buffering::Double,
            other => return Err(errors::argument(format!("buffers must be 1 or 2, not {other}"))),
        };
        let combine_mode = match self.combine_mode {
            "pull" => CombineMode::Pull,
            "push" => CombineMode::Push,
            other => {
                let message = format!("combine_mode must be \"pull\" or \"push\", not {other:?}");
                return Err(errors::argument(message));
            }
        };
        let shape = ChannelConfig {
            ranks,
            tokens_max,
            hidden,
            top_k,
            experts_per_rank,
            dispatch_dtype,
            combine_dtype,
            buffering,
            combine_mode,
        };
        shape.bytes().map_err(errors::argument)?;
        Ok(shape)
    }
}

/// A row as the last dimension of an array: its type for libraries that support it, its type for those that do not, and
/// its length. A row of fp8 is bytes: elements and scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowKind {
    dtype: tensor::Dtype,
    pub(super) plain: tensor::Dtype,
    pub(super) len: usize,
}

impl RowKind {
    pub(super) fn new(dtype: Dtype, hidden: usize) -> RowKind {
        let (dtype_, plain) = match dtype {
            Dtype::F32 => (tensor::Dtype::Float32, tensor::Dtype::Float32),
            Dtype::F16 => (tensor::Dtype::Float16, tensor::Dtype::Float16),
            Dtype::Bf16 => (tensor::Dtype::Bfloat16, tensor::Dtype::Uint16),
            Dtype::Fp8 => (tensor::Dtype::Uint8, tensor::Dtype::Uint8),
        };
        RowKind { dtype: dtype_, plain, len: dtype.row_bytes(hidden) / plain.bytes() }
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.len * self.plain.bytes()
    }

    /// Checks an array of such rows with these outer dimensions; `None` allows any length.
    pub(super) fn array(
        &self,
        what: &str,
        object: &Bound<'_, PyAny>,
        outer: &[Option<usize>],
    ) -> PyResult<Array> {
        let array = Array::of(object)?;
        let found = array.shape();
        let expected = || outer.iter().copied().chain([Some(self.len)]);
        let fits = found.len() == outer.len() + 1
            && found.iter().zip(expected()).all(|(&found, len)| len.is_none_or(|len| found == len as u64));
        let is_of_kind = array.dtype == Some(self.dtype) || array.dtype == Some(self.plain);
        if fits && is_of_kind {
            return Ok(array);
        }
        let word = |len: Option<usize>| len.map_or("tokens".to_owned(), |len| len.to_string());
        Err(wrong(what, &expected().map(word).collect::<Vec<_>>().join(", "), self.dtype.name(), &array))
    }

    /// Returns a new, uninitialized numpy array.
    pub(super) fn empty<'py>(&self, py: Python<'py>, outer: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let shape: Vec<usize> = outer.iter().copied().chain([self.len]).collect();
        py.import("numpy")?.call_method1("empty", (shape, self.plain.name()))
    }
}

/// Returns the experts of tokens: int32 or int64, `[tokens, top_k]`. Numbers beyond 32 bits become an invalid expert.
pub(super) fn experts(object: &Bound<'_, PyAny>, top_k: usize) -> PyResult<Vec<i32>> {
    let array = Array::of(object)?;
    let dtype = array.dtype.filter(|_| is_table(&array, top_k));
    if !matches!(dtype, Some(tensor::Dtype::Int32 | tensor::Dtype::Int64)) {
        return Err(wrong("experts", &format!("tokens, {top_k}"), "int32 or int64", &array));
    }
    let source = array.into_source(object.py())?;
    let narrow = |&bytes| i32::try_from(i64::from_ne_bytes(bytes)).unwrap_or(i32::MIN);
    Ok(match dtype {
        Some(tensor::Dtype::Int64) => source.bytes().as_chunks().0.iter().map(narrow).collect(),
        _ => source.bytes().as_chunks().0.iter().map(|&bytes| i32::from_ne_bytes(bytes)).collect(),
    })
}

/// Returns the weights of experts: float32, `[tokens, top_k]`.
pub(super) fn weights(object: &Bound<'_, PyAny>, top_k: usize) -> PyResult<Vec<f32>> {
    let array = Array::of(object)?;
    if array.dtype != Some(tensor::Dtype::Float32) || !is_table(&array, top_k) {
        return Err(wrong("weights", &format!("tokens, {top_k}"), "float32", &array));
    }
    let source = array.into_source(object.py())?;
    Ok(source.bytes().as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect())
}

fn is_table(array: &Array, columns: usize) -> bool {
    matches!(array.shape()[..], [_, found] if found == columns as u64)
}

fn wrong(what: &str, lengths: &str, of: &str, array: &Array) -> PyErr {
    let (found, dtype) = (array.shape(), array.dtype.map_or("another type", |dtype| dtype.name()));
    errors::argument(format!("{what} must be an array [{lengths}] of {of}, not {found:?} of {dtype}"))
}

/// Whether two address ranges overlap.
pub(super) fn overlap(one: std::ops::Range<usize>, other: std::ops::Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Returns the address range of bytes.
pub(super) fn address_range(bytes: &[u8]) -> std::ops::Range<usize> {
    let start = bytes.as_ptr() as usize;
    start..start + bytes.len()
}

/// An array for results: one of the caller, or a new one.
pub(super) struct OutputArray<'py> {
    pub(super) array: Bound<'py, PyAny>,
    pub(super) target: Target,
}

impl<'py> OutputArray<'py> {
    pub(super) fn of(
        py: Python<'py>,
        kind: &RowKind,
        what: &str,
        given: Option<&Bound<'py, PyAny>>,
        outer: &[usize],
    ) -> PyResult<OutputArray<'py>> {
        let array = match given {
            Some(given) => given.clone(),
            None => kind.empty(py, outer)?,
        };
        let outer: Vec<Option<usize>> = outer.iter().copied().map(Some).collect();
        let target = kind.array(what, &array, &outer)?.into_target()?;
        Ok(OutputArray { array, target })
    }
}
