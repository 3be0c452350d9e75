//! [`Tensor`]: an object with a type and a shape, exported to Python.

use std::ffi::c_int;

use moontide_client::ObjectRef;
use moontide_types::ErrorCode;
use moontide_types::tensor::{TENSOR_HEADER_BYTES, TensorError, TensorHeader};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::array::{format_of_dtype, row_strides};
use crate::dlpack::{self, Request};
use crate::errors;
use crate::pinned::{Layout, Pinned};
use crate::view::array_interface;

/// Tensor that ``put_tensor`` or ``store[key] = array`` stored: read-only, zero-copy if possible.
///
/// numpy and torch read it without a copy: ``tensor.numpy()``, ``tensor.torch()``, ``torch.from_dlpack(tensor)``, and
/// ``numpy.asarray(tensor)`` for standard numpy types. Its memory follows the same rules as that of a View.
///
/// >>> import numpy
/// >>> _ = store.put_tensor("t", numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
/// >>> tensor = store.get_tensor("t")
/// >>> tensor.dtype, tensor.shape
/// ('float32', (2, 3))
/// >>> float(tensor.numpy().sum())
/// 15.0
#[pyclass(module = "moontide", frozen)]
#[derive(Debug)]
pub(crate) struct Tensor {
    pinned: Pinned,
    header: TensorHeader,
    shape: Vec<isize>,
    strides: Vec<isize>,
}

impl Tensor {
    /// Creates the tensor of an object from its header.
    pub(crate) fn new(object: ObjectRef, header: TensorHeader) -> Tensor {
        let lengths: Vec<usize> = header.shape().iter().map(|&len| len as usize).collect();
        Tensor {
            pinned: Pinned::new(object),
            shape: lengths.iter().map(|&len| len as isize).collect(),
            strides: row_strides(&lengths, header.dtype().bytes()),
            header,
        }
    }

    /// Returns the result of a get of a tensor.
    pub(crate) fn of(py: Python<'_>, object: Option<ObjectRef>) -> PyResult<Option<Tensor>> {
        let Some(object) = object else { return Ok(None) };
        let header = header_of(&object).map_err(|error| no_tensor(py, error))?;
        Ok(Some(Tensor::new(object, header)))
    }

    /// Address of the first element.
    fn start(&self, py: Python<'_>) -> PyResult<*const u8> {
        Ok(self.pinned.address_and_len(py)?.0.wrapping_add(TENSOR_HEADER_BYTES))
    }
}

/// Decodes the tensor header of an object.
pub(crate) fn header_of(object: &[u8]) -> Result<TensorHeader, TensorError> {
    TensorHeader::decode(object, object.len() as u64)
}

/// Returns the exception for an object that is not a tensor.
pub(crate) fn no_tensor(py: Python<'_>, error: TensorError) -> PyErr {
    errors::other(py, ErrorCode::InvalidArgument, error)
}

#[pymethods]
impl Tensor {
    /// Element type, by its name in numpy and torch.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.header.dtype().name()
    }

    /// Number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.header.shape())
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.header.payload_bytes()
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

    /// Returns a read-only numpy array over the same memory. bfloat16 and float8 need the package ml_dtypes.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let numpy = slf.py().import("numpy")?;
        let dtype = slf.get().header.dtype();
        let array = numpy.call_method1("asarray", (slf,))?;
        if format_of_dtype(dtype).is_some() {
            return Ok(array);
        }
        let kind = slf.py().import("ml_dtypes")?.getattr(dtype.name())?;
        array.call_method1("view", (kind,))
    }

    /// Returns a torch tensor over the same memory. torch has no read-only tensors: do not write to it.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.header.shape().first() {
            Some(&len) => Ok(len as usize),
            None => Err(pyo3::exceptions::PyTypeError::new_err("a tensor without dimensions has no length")),
        }
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.header.shape().iter().map(u64::to_string).collect();
        format!("<moontide.Tensor {} [{}]>", self.header.dtype().name(), shape.join(", "))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let dtype = this.header.dtype();
        let format = format_of_dtype(dtype).ok_or_else(|| {
            PyBufferError::new_err(format!(
                "the buffer protocol does not support {}; use .numpy(), .torch() or DLPack",
                dtype.name()
            ))
        })?;
        let layout = Layout { format, item_bytes: dtype.bytes(), shape: &this.shape, strides: &this.strides };
        // SAFETY: Python's buffer; the layout belongs to this immutable object and fits the elements: their size is the
        // product of element size and shape.
        unsafe { this.pinned.export_buffer(slf.as_any(), view, flags, TENSOR_HEADER_BYTES, layout) }
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.pinned.release_buffer();
    }

    #[getter]
    fn __array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let this = slf.get();
        array_interface(slf.py(), this.start(slf.py())?, this.header.dtype(), this.header.shape())
    }

    /// Exports the elements to an array library. Read-only.
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
        let start = || this.start(slf.py());
        dlpack::export(slf.as_any(), start, this.header.dtype(), this.header.shape(), &request)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::DEVICE
    }
}
