//! [`Memory`]: memory that somebody knows by its address.

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::arguments::python_bool;
use crate::errors;

/// Memory by its address, as a buffer: what an engine has allocated itself and knows by a pointer.
///
/// Whoever makes one vouches for it: the memory must stay as long as the object and everything made from it.
///
/// >>> import ctypes
/// >>> block = (ctypes.c_uint8 * 4096)()
/// >>> memory = moontide.Memory(ctypes.addressof(block), 4096)
/// >>> store.put("from-memory", memory)
/// True
/// >>> store.get_into("from-memory", memory)
/// 4096
#[pyclass(module = "moontide", frozen)]
#[derive(Debug)]
pub(crate) struct Memory {
    address: usize,
    size: usize,
    readonly: bool,
}

#[pymethods]
impl Memory {
    #[new]
    #[pyo3(signature = (address, size, readonly=false))]
    fn new(address: usize, size: usize, readonly: bool) -> PyResult<Memory> {
        let end = address.checked_add(size).filter(|&end| end <= isize::MAX as usize);
        if address == 0 || end.is_none() {
            return Err(errors::argument(format!("{size} bytes at {address:#x} are no memory")));
        }
        Ok(Memory { address, size, readonly })
    }

    /// Where it begins.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    fn __len__(&self) -> usize {
        self.size
    }

    fn __repr__(&self) -> String {
        format!("Memory({:#x}, {}, readonly={})", self.address, self.size, python_bool(self.readonly))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if this.readonly && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("this memory is read-only"));
        }
        let (start, len) = (this.address as *mut c_void, this.size as isize);
        // SAFETY: Python gives a buffer to fill; that the memory is there, the object's maker vouches for.
        match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, this.readonly.into(), flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}
