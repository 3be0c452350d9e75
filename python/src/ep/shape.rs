//! Words for shapes: dtypes, and the arrays that have them.

use moontide_ep::{Buffers, Dtype, Returns, Shape};
use moontide_types::tensor;
use pyo3::prelude::*;

use crate::array::{Array, Target};
use crate::errors;

/// By the name that torch has for it.
pub(super) fn dtype(what: &str, name: &str) -> PyResult<Dtype> {
    Ok(match name {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::Bf16,
        "float8" | "float8_e4m3fn" => Dtype::Fp8,
        _ => {
            return Err(errors::argument(format!(
                "{what} is \"float32\", \"float16\", \"bfloat16\" or \"float8\", not {name:?}"
            )));
        }
    })
}

/// Settings of a channel as Python names them.
pub(super) struct Settings<'a> {
    pub(super) ranks: usize,
    pub(super) tokens_max: usize,
    pub(super) hidden: usize,
    pub(super) top_k: usize,
    pub(super) experts_per_rank: usize,
    pub(super) send: &'a str,
    pub(super) back: Option<&'a str>,
    pub(super) buffers: usize,
    pub(super) returns: &'a str,
}

impl Settings<'_> {
    pub(super) fn shape(&self) -> PyResult<Shape> {
        let Settings { ranks, tokens_max, hidden, top_k, experts_per_rank, .. } = *self;
        let send = dtype("send", self.send)?;
        let back = match self.back {
            Some(name) => dtype("back", name)?,
            None if send == Dtype::Fp8 => Dtype::Bf16,
            None => send,
        };
        let buffers = match self.buffers {
            1 => Buffers::One,
            2 => Buffers::Two,
            other => return Err(errors::argument(format!("buffers is 1 or 2, not {other}"))),
        };
        let returns = match self.returns {
            "pull" => Returns::Pull,
            "push" => Returns::Push,
            other => return Err(errors::argument(format!("returns is \"pull\" or \"push\", not {other:?}"))),
        };
        let shape =
            Shape { ranks, tokens_max, hidden, top_k, experts_per_rank, send, back, buffers, returns };
        shape.bytes().map_err(errors::argument)?;
        Ok(shape)
    }
}

/// How a row of numbers is an array's last dimension: its type to libraries that know it, to those that do not, and how
/// many. A row of fp8 is bytes: numbers and scales.
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

    /// An array of such rows, in these outer dimensions; `None` is any number.
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

    /// A new array of numpy's, not filled.
    pub(super) fn empty<'py>(&self, py: Python<'py>, outer: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let shape: Vec<usize> = outer.iter().copied().chain([self.len]).collect();
        py.import("numpy")?.call_method1("empty", (shape, self.plain.name()))
    }
}

/// Experts of tokens: int32 or int64, `[tokens, top_k]`. Those beyond 32 bits are no rank's.
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

/// Their weights: float32, `[tokens, top_k]`.
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

/// Whether two pieces of memory have a byte in common.
pub(super) fn overlap(one: std::ops::Range<usize>, other: std::ops::Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Where bytes lie.
pub(super) fn place(bytes: &[u8]) -> std::ops::Range<usize> {
    let start = bytes.as_ptr() as usize;
    start..start + bytes.len()
}

/// An array to be filled: one that was given, or a new one.
pub(super) struct Filled<'py> {
    pub(super) array: Bound<'py, PyAny>,
    pub(super) target: Target,
}

impl<'py> Filled<'py> {
    pub(super) fn of(
        py: Python<'py>,
        kind: &RowKind,
        what: &str,
        given: Option<&Bound<'py, PyAny>>,
        outer: &[usize],
    ) -> PyResult<Filled<'py>> {
        let array = match given {
            Some(given) => given.clone(),
            None => kind.empty(py, outer)?,
        };
        let outer: Vec<Option<usize>> = outer.iter().copied().map(Some).collect();
        let target = kind.array(what, &array, &outer)?.into_target()?;
        Ok(Filled { array, target })
    }
}
