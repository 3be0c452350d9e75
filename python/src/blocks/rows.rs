//! [`Rows`]: elements of a cache, exported to array libraries without a copy.

use std::ffi::c_int;
use std::sync::Arc;

use moontide_blocks::Arena;
use moontide_types::tensor::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::shape::ElementKind;
use super::writer::WriterGuard;
use crate::array::{format_of_dtype, row_strides, typestr_of_dtype};
use crate::dlpack::{self, Elements, Request};
use crate::pinned::{Layout, Memory};
use crate::process::{ProcessLocal, unusable_error};

/// Elements of a cache, zero-copy: ``[tokens, heads, dim]`` of one block or of adjacent blocks, or
/// ``[blocks, tokens, heads, dim]`` of the arena.
///
/// numpy and torch read it without a copy: ``numpy.asarray(rows)`` or ``rows.numpy()``, ``torch.from_dlpack(rows)`` or
/// ``rows.torch()``. Types that numpy does not have appear as integers of the same size (``bfloat16`` is ``uint16``);
/// torch has the real type. The memory stays valid until this and everything made from it are dropped.
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
    owner: ProcessLocal<MemoryOwner>,
    /// Address of the first element; an integer, because pointers are not `Send`.
    address: usize,
    dtype: Dtype,
    plain_dtype: Dtype,
    lengths: Vec<usize>,
    shape: Vec<isize>,
    /// In bytes.
    strides: Vec<isize>,
    readonly: bool,
}

/// Owner of the memory.
#[derive(Debug)]
#[allow(dead_code)] // held, not read
pub(crate) enum MemoryOwner {
    /// Complete rows, read-only.
    Pinned(Arc<moontide_blocks::PinnedBlocks>),
    /// Uncommitted rows, not visible to readers.
    Writer(Arc<WriterGuard>),
    /// All rows, unchecked.
    Arena(Arc<Arena>),
}

impl Rows {
    /// Creates rows at an address whose provenance is exposed. `outer` has length and stride of all dimensions but the
    /// last.
    ///
    /// # Safety
    /// Elements of this kind exist at all indices of these dimensions and live as long as the owner. If the owner is
    /// `Pinned`, no code writes them.
    pub(crate) unsafe fn new(
        owner: MemoryOwner,
        kind: &ElementKind,
        address: usize,
        outer: &[(usize, usize)],
    ) -> Rows {
        let (bytes, dim) = (kind.dtype.bytes(), kind.shape.dim());
        let all = || outer.iter().copied().chain([(dim, bytes)]);
        Rows {
            readonly: matches!(owner, MemoryOwner::Pinned(_)),
            owner: ProcessLocal::new(owner),
            address,
            dtype: kind.dtype,
            plain_dtype: kind.plain_dtype(),
            lengths: all().map(|(len, _)| len).collect(),
            shape: all().map(|(len, _)| len as isize).collect(),
            strides: all().map(|(_, stride)| stride as isize).collect(),
        }
    }

    /// Address of the first element. Fails in a forked child.
    fn start(&self, py: Python<'_>) -> PyResult<*const u8> {
        self.owner.with(|_| ()).map_err(|reason| unusable_error(py, "cache", reason))?;
        Ok(std::ptr::with_exposed_provenance(self.address))
    }

    /// Whether there are no gaps between the rows.
    fn is_dense(&self) -> bool {
        let expected = row_strides(&self.lengths, self.dtype.bytes());
        let mut pairs = self.lengths.iter().zip(self.strides.iter().zip(&expected));
        pairs.all(|(&len, (stride, expected))| len == 1 || stride == expected)
    }
}

#[pymethods]
impl Rows {
    /// Element type, by its name in torch.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.lengths)
    }

    /// Stride of each dimension in bytes.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.lengths.iter().product::<usize>() * self.dtype.bytes()
    }

    /// Whether the memory is read-only.
    #[getter]
    fn readonly(&self) -> bool {
        self.readonly
    }

    /// Address of the first element, for callers that need a pointer. This object must outlive its use.
    fn ptr(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.start(py)? as usize)
    }

    /// Returns a numpy array over the same memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// Returns a torch tensor over the same memory. torch has no read-only tensors: do not write to read-only rows.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    fn __len__(&self) -> usize {
        self.lengths[0]
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.lengths.iter().map(usize::to_string).collect();
        let access = if self.readonly { "" } else { ", writable" };
        format!("<moontide.blocks.Rows {} [{}]{access}>", self.dtype.name(), shape.join(", "))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let requested = |flag: c_int| flags & flag == flag;
        if this.readonly && requested(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err("committed rows are read-only; modify a copy"));
        }
        let needs_contiguous = requested(ffi::PyBUF_C_CONTIGUOUS)
            || requested(ffi::PyBUF_ANY_CONTIGUOUS)
            || !requested(ffi::PyBUF_STRIDES);
        if needs_contiguous && !this.is_dense() {
            return Err(PyBufferError::new_err(
                "the elements are not contiguous: there are gaps between the heads",
            ));
        }
        if requested(ffi::PyBUF_F_CONTIGUOUS) && this.lengths.iter().filter(|&&len| len > 1).count() > 1 {
            return Err(PyBufferError::new_err("the elements are in row-major order, not column-major"));
        }
        let format = format_of_dtype(this.plain_dtype).expect("a plain type has a format");
        let layout =
            Layout { format, item_bytes: this.dtype.bytes(), shape: &this.shape, strides: &this.strides };
        let memory = Memory { start: this.start(slf.py())?, len: this.nbytes(), readonly: this.readonly };
        // SAFETY: Python's buffer; the layout belongs to this immutable object, which keeps the memory alive; the
        // checks above ensure that it satisfies the flags.
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

    /// Exports the elements to an array library.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream; // host memory has no streams
        let this = slf.get();
        let request = Request { max_version, device: dl_device, copy };
        let Rows { dtype, lengths, strides, readonly, .. } = this;
        let elements = Elements { dtype: *dtype, shape: lengths, strides, readonly: *readonly };
        dlpack::export_strided(slf.as_any(), || this.start(slf.py()), elements, &request)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::DEVICE
    }
}
