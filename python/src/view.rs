//! [`View`]: the bytes of an object, exported to Python.

use std::ffi::c_int;

use moontide_client::ObjectRef;
use moontide_types::tensor::Dtype;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::python_bool;
use crate::dlpack::{self, Request};
use crate::pinned::{Layout, Pinned};
use crate::store::UninitBytes;

/// Read-only bytes of an object: zero-copy in the memory of a local node, or a copy.
///
/// A view is a buffer: ``memoryview(view)``, ``numpy.frombuffer(view, dtype)`` and ``numpy.asarray(view)`` read it
/// without a copy. Zero-copy bytes do not change until the view and everything made from it are dropped, even if the
/// object is removed, replaced or evicted. Drop views soon: the node cannot reuse the memory before.
///
/// >>> _ = store.put("k", b"tides")
/// >>> view = store.get_view("k")
/// >>> len(view), view.zero_copy, bytes(view)
/// (5, True, b'tides')
/// >>> with store.get_view("k") as view:
/// ...     first = memoryview(view)[0]
/// >>> first
/// 116
#[pyclass(module = "moontide", frozen)]
#[derive(Debug)]
pub(crate) struct View {
    pinned: Pinned,
    shape: [isize; 1],
}

impl View {
    pub(crate) fn new(object: ObjectRef) -> View {
        let shape = [object.len() as isize];
        View { pinned: Pinned::new(object), shape }
    }
}

#[pymethods]
impl View {
    /// Address of the first byte, for callers that need a pointer. The view must outlive its use.
    fn ptr(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.pinned.address_and_len(py)?.0 as usize)
    }

    /// Number of bytes.
    fn size(&self) -> usize {
        self.shape[0] as usize
    }

    /// Whether the bytes are in the node's memory (zero-copy), not a copy.
    #[getter]
    fn zero_copy(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.pinned.object(py)?.is_zero_copy())
    }

    /// Compares the bytes with their digest. If it returns False, discard the bytes and get the object again.
    fn verify(&self, py: Python<'_>) -> PyResult<bool> {
        let object = self.pinned.object(py)?;
        Ok(py.detach(|| object.verify()))
    }

    /// Releases the memory now. Raises BufferError while something made from it exists.
    fn release(&self) -> PyResult<()> {
        self.pinned.release()
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        // Arrays made from the view may outlive the block; then the last of them releases the memory.
        let _ = self.pinned.release();
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        UninitBytes::copy(py, &self.pinned.object(py)?)
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(other) = crate::array::Source::of(other) else { return Ok(false) };
        let object = self.pinned.object(py)?;
        Ok(object[..] == *other.bytes())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.pinned.object(py).map(|object| object.is_zero_copy()) {
            Ok(zero_copy) => {
                format!("<moontide.View of {} bytes, zero_copy={}>", self.shape[0], python_bool(zero_copy))
            }
            Err(_) => "<moontide.View, released>".to_owned(),
        }
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let layout = Layout { format: c"B", item_bytes: 1, shape: &this.shape, strides: &[1] };
        // SAFETY: Python's buffer; the layout belongs to this object or is static, and describes all of its bytes.
        unsafe { this.pinned.export_buffer(slf.as_any(), view, flags, 0, layout) }
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.pinned.release_buffer();
    }

    #[getter]
    fn __array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let py = slf.py();
        let (start, len) = slf.get().pinned.address_and_len(py)?;
        array_interface(py, start, Dtype::Uint8, &[len as u64])
    }

    /// Exports the bytes to an array library. Read-only.
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
        let start = || Ok(this.pinned.address_and_len(slf.py())?.0);
        let request = Request { max_version, device: dl_device, copy };
        dlpack::export(slf.as_any(), start, Dtype::Uint8, &[this.shape[0] as u64], &request)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::DEVICE
    }
}

/// Returns a read-only `__array_interface__`. The caller references the object as long as it uses the memory.
pub(crate) fn array_interface<'py>(
    py: Python<'py>,
    start: *const u8,
    dtype: Dtype,
    shape: &[u64],
) -> PyResult<Bound<'py, PyDict>> {
    let interface = PyDict::new(py);
    interface.set_item("version", 3)?;
    interface.set_item("typestr", crate::array::typestr_of_dtype(dtype))?;
    interface.set_item("shape", pyo3::types::PyTuple::new(py, shape)?)?;
    interface.set_item("data", (start as usize, true))?;
    Ok(interface)
}
