//! [`TokenRows`]: tokens of one rank, exported without a copy.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use moontide_symmetric::Rank;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use super::channel::Shared;
use super::step::with_dispatched;
use crate::array::format_of_dtype;
use crate::pinned::{Layout, Memory};
use crate::process::{ProcessLocal, unusable_error};

/// Zero-copy, read-only tokens ``[tokens, hidden]`` of one rank: ``numpy.asarray(rows)`` or ``rows.numpy()``. The step
/// cannot continue while an array of them exists. After the step has continued, they can no longer be accessed.
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct TokenRows {
    shared: ProcessLocal<Arc<Shared>>,
    step: u64,
    source: u32,
    shape: [isize; 2],
    /// In bytes.
    strides: [isize; 2],
}

impl TokenRows {
    pub(super) fn new(
        shared: Arc<Shared>,
        step: u64,
        source: u32,
        tokens: usize,
        stride: usize,
    ) -> TokenRows {
        let shape = [tokens as isize, shared.dispatch_rows.len as isize];
        let strides = [stride as isize, shared.dispatch_rows.plain.bytes() as isize];
        TokenRows { shared: ProcessLocal::new(shared), step, source, shape, strides }
    }
}

#[pymethods]
impl TokenRows {
    /// Rank of the tokens.
    #[getter]
    fn source(&self) -> u32 {
        self.source
    }

    /// Number of tokens, and elements per token; for float8, bytes per token.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape)
    }

    /// Returns a numpy array over the same memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        TokenRows::__array__(slf, None, None)
    }

    /// As ``numpy``, for numpy's own conversion. Without it, numpy makes an array of one object if the buffer export
    /// fails.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let made = if copy == Some(true) { "array" } else { "asarray" };
        let buffer = PyMemoryView::from(slf)?;
        slf.py().import("numpy")?.call_method1(made, (buffer, dtype))
    }

    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    fn __repr__(&self) -> String {
        let [tokens, numbers] = self.shape;
        format!("<moontide.ep.TokenRows of rank {} [{tokens}, {numbers}]>", self.source)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let requested = |flag: c_int| flags & flag == flag;
        if requested(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err("tokens are read-only; modify a copy"));
        }
        let shared = this.shared.with(Arc::clone).map_err(|reason| unusable_error(py, "step", reason))?;
        let [tokens, _] = this.shape;
        let row_bytes = shared.dispatch_rows.row_bytes();
        let is_dense = tokens <= 1 || this.strides[0] == row_bytes as isize;
        let is_plain = requested(ffi::PyBUF_C_CONTIGUOUS)
            || requested(ffi::PyBUF_ANY_CONTIGUOUS)
            || !requested(ffi::PyBUF_STRIDES);
        if (is_plain && !is_dense) || (requested(ffi::PyBUF_F_CONTIGUOUS) && tokens > 1) {
            return Err(PyBufferError::new_err("there are gaps between the rows"));
        }
        // Under the lock of the channel: either the step sees the new count, or this call sees that the step continued.
        let exported = py.detach(|| {
            with_dispatched(&shared, this.step, |dispatched| {
                shared.borrowed.fetch_add(1, Ordering::SeqCst);
                dispatched.rows_of(Rank(this.source)).bytes.as_ptr().expose_provenance()
            })
        });
        let start =
            exported.map_err(|error| PyBufferError::new_err(error.raise(py).value(py).to_string()))?;
        let format = format_of_dtype(shared.dispatch_rows.plain).expect("a plain type has a format");
        let item_bytes = shared.dispatch_rows.plain.bytes();
        let layout = Layout { format, item_bytes, shape: &this.shape, strides: &this.strides };
        let len = tokens as usize * row_bytes;
        let memory = Memory { start: std::ptr::with_exposed_provenance(start), len, readonly: true };
        // SAFETY: Python's buffer; the layout belongs to this immutable object. The rows stay valid and are not written
        // while they are counted as borrowed, and this object keeps the channel alive.
        unsafe { layout.fill(slf.as_any(), view, flags, memory) };
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        // In a forked child no step can continue, so the count does not matter.
        let _ = self.shared.with(|shared| shared.borrowed.fetch_sub(1, Ordering::SeqCst));
    }
}
