//! [`TokenRows`]: tokens of one source, lent where they lie.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use moontide_heap::Rank;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use super::channel::Shared;
use super::step::received_in;
use crate::array::format_of_dtype;
use crate::pinned::{Layout, Memory};
use crate::process::{OfProcess, gone};

/// The tokens of one rank where they lie, ``[tokens, hidden]``, read-only: ``numpy.asarray(rows)`` or ``rows.numpy()``. The step
/// does not go on while there is an array of them; when it has gone on, they can no longer be had.
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct TokenRows {
    inside: OfProcess<Arc<Shared>>,
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
        let shape = [tokens as isize, shared.send.len as isize];
        let strides = [stride as isize, shared.send.plain.bytes() as isize];
        TokenRows { inside: OfProcess::new(shared), step, source, shape, strides }
    }
}

#[pymethods]
impl TokenRows {
    /// Whose tokens they are.
    #[getter]
    fn source(&self) -> u32 {
        self.source
    }

    /// How many tokens, of how many numbers; for float8, of how many bytes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape)
    }

    /// A numpy array over the same memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        TokenRows::__array__(slf, None, None)
    }

    /// The same, where numpy asks for it: when there is no buffer to be had it would otherwise make an array of one object.
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
        let asked = |flag: c_int| flags & flag == flag;
        if asked(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err("tokens are read-only; copy what is to be changed"));
        }
        let shared = this.inside.with(Arc::clone).map_err(|why| gone(py, "step", why))?;
        let [tokens, _] = this.shape;
        let row_bytes = shared.send.row_bytes();
        let is_dense = tokens <= 1 || this.strides[0] == row_bytes as isize;
        let is_plain =
            asked(ffi::PyBUF_C_CONTIGUOUS) || asked(ffi::PyBUF_ANY_CONTIGUOUS) || !asked(ffi::PyBUF_STRIDES);
        if (is_plain && !is_dense) || (asked(ffi::PyBUF_F_CONTIGUOUS) && tokens > 1) {
            return Err(PyBufferError::new_err("there are gaps between the rows"));
        }
        // Under the channel's lock, so that a step which goes on sees it or is seen.
        let lent = py.detach(|| {
            received_in(&shared, this.step, |received| {
                shared.lent.fetch_add(1, Ordering::SeqCst);
                received.rows_of(Rank(this.source)).bytes.as_ptr().expose_provenance()
            })
        });
        let start = lent.map_err(|why| PyBufferError::new_err(why.raise(py).value(py).to_string()))?;
        let format = format_of_dtype(shared.send.plain).expect("numbers that every library knows");
        let item_bytes = shared.send.plain.bytes();
        let layout = Layout { format, item_bytes, shape: &this.shape, strides: &this.strides };
        let len = tokens as usize * row_bytes;
        let memory = Memory { start: std::ptr::with_exposed_provenance(start), len, readonly: true };
        // SAFETY: Python's buffer; the layout is of this object, which does not change. The rows stay and are not written
        // while they are counted as lent, and the channel with them, which this object holds.
        unsafe { layout.fill(slf.as_any(), view, flags, memory) };
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        // A forked child has no step that could go on.
        let _ = self.inside.with(|shared| shared.lent.fetch_sub(1, Ordering::SeqCst));
    }
}
