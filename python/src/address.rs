//! [`RawMemory`]: memory at an address that the caller passes.

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::arguments::python_bool;
use crate::errors;

/// Buffer over memory that is known by its address, for example memory that an inference engine allocated.
///
/// The caller guarantees that the memory stays valid as long as this object and everything made from it.
///
/// >>> import ctypes
/// >>> block = (ctypes.c_uint8 * 4096)()
/// >>> memory = moontide.RawMemory(ctypes.addressof(block), 4096)
/// >>> store.put("from-memory", memory)
/// True
/// >>> store.get_into("from-memory", memory)
/// 4096
#[pyclass(module = "moontide", frozen)]
#[derive(Debug)]
pub(crate) struct RawMemory {
    address: usize,
    size: usize,
    readonly: bool,
}

#[pymethods]
impl RawMemory {
    #[new]
    #[pyo3(signature = (address, size, readonly=false))]
    fn new(address: usize, size: usize, readonly: bool) -> PyResult<RawMemory> {
        let end = address.checked_add(size).filter(|&end| end <= isize::MAX as usize);
        if address == 0 || end.is_none() {
            return Err(errors::argument(format!(
                "{size} bytes at {address:#x} are not a valid address range"
            )));
        }
        Ok(RawMemory { address, size, readonly })
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    fn __len__(&self) -> usize {
        self.size
    }

    fn __repr__(&self) -> String {
        format!("RawMemory({:#x}, {}, readonly={})", self.address, self.size, python_bool(self.readonly))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if this.readonly && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("this memory is read-only"));
        }
        let (start, len) = (this.address as *mut c_void, this.size as isize);
        // SAFETY: Python passes a buffer to fill; the creator of the object guarantees that the memory is valid.
        match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, this.readonly.into(), flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}
