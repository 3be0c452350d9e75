//! [`Rows`]: numbers of a cache, lent to array libraries in place.

use std::ffi::c_int;
use std::sync::Arc;

use moontide_blocks::Arena;
use moontide_types::tensor::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::fill::Filling;
use super::shape::Kind;
use crate::array::{format_of_dtype, row_strides, typestr_of_dtype};
use crate::dlpack::{self, Elements, Request};
use crate::pinned::{Layout, Memory};
use crate::process::{OfProcess, gone};

/// Numbers of a cache where they lie: ``[tokens, heads, dim]`` of a block or a run of blocks, or
/// ``[blocks, tokens, heads, dim]`` of the arena.
///
/// numpy and torch read it without a copy: ``numpy.asarray(rows)`` or ``rows.numpy()``, ``torch.from_dlpack(rows)`` or
/// ``rows.torch()``. Types that numpy does not know are numbers of the same size there (``bfloat16`` is ``uint16``); to
/// torch they are what they are. The memory stays until this and everything made from it is dropped.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=1, kv_heads=2, dim=4, dtype="bfloat16", blocks=8)
/// >>> rows = cache.arena("k", 0)
/// >>> rows.dtype, rows.shape, rows.readonly
/// ('bfloat16', (8, 16, 2, 4), False)
/// >>> numpy.asarray(rows).dtype
/// dtype('uint16')
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct Rows {
    keeper: OfProcess<Keeper>,
    /// Where the numbers begin: a number, since pointers belong to a thread.
    address: usize,
    dtype: Dtype,
    plain_dtype: Dtype,
    lengths: Vec<usize>,
    shape: Vec<isize>,
    /// In bytes.
    strides: Vec<isize>,
    readonly: bool,
}

/// What keeps the memory, and what is in it.
#[derive(Debug)]
#[allow(dead_code)] // held, not read
pub(crate) enum Keeper {
    /// Complete rows, which are not written.
    Held(Arc<moontide_blocks::Held>),
    /// Rows that nobody else sees.
    Filling(Arc<Filling>),
    /// All rows, for whoever knows what it does.
    Arena(Arc<Arena>),
}

impl Rows {
    /// Those at an address (whose provenance is exposed), with all dimensions but the last: how many, and how far apart.
    ///
    /// # Safety
    /// So many numbers of this kind are there at these distances, and stay as long as the keeper; if the keeper is
    /// `Held`, nobody writes them.
    pub(crate) unsafe fn new(keeper: Keeper, kind: &Kind, address: usize, outer: &[(usize, usize)]) -> Rows {
        let (bytes, dim) = (kind.dtype.bytes(), kind.shape.dim());
        let all = || outer.iter().copied().chain([(dim, bytes)]);
        Rows {
            readonly: matches!(keeper, Keeper::Held(_)),
            keeper: OfProcess::new(keeper),
            address,
            dtype: kind.dtype,
            plain_dtype: kind.plain_dtype(),
            lengths: all().map(|(len, _)| len).collect(),
            shape: all().map(|(len, _)| len as isize).collect(),
            strides: all().map(|(_, stride)| stride as isize).collect(),
        }
    }

    /// Where the numbers begin, in the process that has them.
    fn start(&self, py: Python<'_>) -> PyResult<*const u8> {
        self.keeper.with(|_| ()).map_err(|why| gone(py, "cache", why))?;
        Ok(std::ptr::with_exposed_provenance(self.address))
    }

    /// Whether there is nothing between the rows.
    fn is_dense(&self) -> bool {
        let expected = row_strides(&self.lengths, self.dtype.bytes());
        let mut pairs = self.lengths.iter().zip(self.strides.iter().zip(&expected));
        pairs.all(|(&len, (stride, expected))| len == 1 || stride == expected)
    }
}

#[pymethods]
impl Rows {
    /// What a number is, by the name that torch has for it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// How many numbers there are in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.lengths)
    }

    /// How far they are apart in each dimension, in bytes.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    /// Bytes of all numbers.
    #[getter]
    fn nbytes(&self) -> usize {
        self.lengths.iter().product::<usize>() * self.dtype.bytes()
    }

    /// Whether they can only be read.
    #[getter]
    fn readonly(&self) -> bool {
        self.readonly
    }

    /// Where they begin in memory, for callers who need a pointer. This must outlive its use.
    fn ptr(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.start(py)? as usize)
    }

    /// A numpy array over the same memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// A torch tensor over the same memory. torch has no read-only tensors: do not write into one that is.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    fn __len__(&self) -> usize {
        self.lengths[0]
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.lengths.iter().map(usize::to_string).collect();
        let how = if self.readonly { "" } else { ", writable" };
        format!("<moontide.blocks.Rows {} [{}]{how}>", self.dtype.name(), shape.join(", "))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let asked = |flag: c_int| flags & flag == flag;
        if this.readonly && asked(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err(
                "rows that others see are read-only; copy what is to be changed",
            ));
        }
        let one_after_the_other =
            asked(ffi::PyBUF_C_CONTIGUOUS) || asked(ffi::PyBUF_ANY_CONTIGUOUS) || !asked(ffi::PyBUF_STRIDES);
        if one_after_the_other && !this.is_dense() {
            return Err(PyBufferError::new_err(
                "heads lie apart in memory: there are gaps between the numbers",
            ));
        }
        if asked(ffi::PyBUF_F_CONTIGUOUS) && this.lengths.iter().filter(|&&len| len > 1).count() > 1 {
            return Err(PyBufferError::new_err("the numbers lie row by row, not column by column"));
        }
        let format = format_of_dtype(this.plain_dtype).expect("numbers that every library knows");
        let layout =
            Layout { format, item_bytes: this.dtype.bytes(), shape: &this.shape, strides: &this.strides };
        let memory = Memory { start: this.start(slf.py())?, len: this.nbytes(), readonly: this.readonly };
        // SAFETY: Python's buffer; the layout is of this object, which does not change and keeps the memory, and was
        // looked at above for what the flags ask.
        unsafe { layout.fill(slf.as_any(), view, flags, memory) };
        Ok(())
    }

    #[getter]
    fn __array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let (py, this) = (slf.py(), slf.get());
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", typestr_of_dtype(this.plain_dtype))?;
        interface.set_item("shape", this.shape(py)?)?;
        interface.set_item("strides", this.strides(py)?)?;
        interface.set_item("data", (this.start(py)? as usize, this.readonly))?;
        Ok(interface)
    }

    /// Lends the numbers to an array library.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream; // memory of this host has none
        let this = slf.get();
        let request = Request { max_version, device: dl_device, copy };
        let Rows { dtype, lengths, strides, readonly, .. } = this;
        let elements = Elements { dtype: *dtype, shape: lengths, strides, readonly: *readonly };
        dlpack::lend_strided(slf.as_any(), || this.start(slf.py()), elements, &request)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::DEVICE
    }
}
