//! [`Pinned`]: an object that Python reads zero-copy, and its lifetime.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use moontide_client::ObjectRef;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::process::{ProcessLocal, Unusable, unusable_error};

/// Bytes of an object. They stay valid until this is released or dropped. It cannot be released while buffers of it
/// exist.
#[derive(Debug)]
pub(crate) struct Pinned {
    object: ProcessLocal<Arc<ObjectRef>>,
    /// Number of exported buffers that were not released.
    buffers: AtomicUsize,
}

impl Pinned {
    pub(crate) fn new(object: ObjectRef) -> Pinned {
        Pinned { object: ProcessLocal::new(Arc::new(object)), buffers: AtomicUsize::new(0) }
    }

    /// Returns the object for a short use.
    pub(crate) fn object(&self, py: Python<'_>) -> PyResult<Arc<ObjectRef>> {
        self.object.with(Arc::clone).map_err(|reason| released(py, reason))
    }

    /// Returns address and length of the bytes for a user that never releases them. From now on they stay valid until
    /// this is dropped.
    pub(crate) fn address_and_len(&self, py: Python<'_>) -> PyResult<(*const u8, usize)> {
        let found = self.object.with(|object| {
            self.buffers.fetch_add(1, Ordering::SeqCst);
            (object.as_ptr(), object.len())
        });
        found.map_err(|reason| released(py, reason))
    }

    pub(crate) fn release(&self) -> PyResult<()> {
        let released = self.object.take_unless(|| match self.buffers.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(PyBufferError::new_err(
                "an array, a memoryview or an address still uses the memory; it is released when the view and all of them \
                 are dropped",
            )),
        });
        released.map(drop)
    }

    /// Exports the bytes of the object from `offset` on as a read-only buffer with the given layout.
    ///
    /// # Safety
    /// Python passed `view` to `__getbuffer__`; `layout` lives as long as `owner`, and fits the object.
    pub(crate) unsafe fn export_buffer(
        &self,
        owner: &Bound<'_, PyAny>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
        offset: usize,
        layout: Layout<'_>,
    ) -> PyResult<()> {
        let py = owner.py();
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("objects of the store are read-only; modify a copy"));
        }
        let is_row_major_only = layout.shape.iter().filter(|&&len| len > 1).count() > 1;
        if flags & ffi::PyBUF_F_CONTIGUOUS == ffi::PyBUF_F_CONTIGUOUS && is_row_major_only {
            return Err(PyBufferError::new_err("the elements are in row-major order, not column-major"));
        }
        let exported = self.object.with(|object| {
            self.buffers.fetch_add(1, Ordering::SeqCst);
            let bytes = &object[offset..];
            (bytes.as_ptr(), bytes.len())
        });
        let (start, len) = exported.map_err(|reason| released(py, reason))?;
        // SAFETY: the caller's buffer and layout.
        unsafe { layout.fill(owner, view, flags, Memory { start, len, readonly: true }) };
        Ok(())
    }

    /// Counts a buffer as released.
    pub(crate) fn release_buffer(&self) {
        self.buffers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Layout of the elements of a buffer.
pub(crate) struct Layout<'a> {
    pub(crate) format: &'static CStr,
    pub(crate) item_bytes: usize,
    pub(crate) shape: &'a [isize],
    pub(crate) strides: &'a [isize],
}

/// Memory of a buffer.
pub(crate) struct Memory {
    pub(crate) start: *const u8,
    /// Bytes of all elements.
    pub(crate) len: usize,
    pub(crate) readonly: bool,
}

impl Layout<'_> {
    /// Fills a buffer.
    ///
    /// # Safety
    /// Python passed `view` to `__getbuffer__`. The layout lives as long as `owner`, which keeps the memory alive, and
    /// fits it. The layout satisfies the flags.
    pub(crate) unsafe fn fill(
        &self,
        owner: &Bound<'_, PyAny>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
        memory: Memory,
    ) {
        let requested = |flag: c_int| flags & flag == flag;
        let list = |flag: c_int, list: &[isize]| match requested(flag) {
            true => list.as_ptr().cast_mut(),
            false => std::ptr::null_mut(),
        };
        // SAFETY: the caller's buffer; everything stored in it lives as long as the owner, to which the buffer holds a
        // reference.
        unsafe {
            (*view).obj = owner.clone().into_ptr();
            (*view).buf = memory.start.cast_mut().cast::<c_void>();
            (*view).len = memory.len as isize;
            (*view).readonly = c_int::from(memory.readonly);
            (*view).itemsize = self.item_bytes as isize;
            (*view).format = match requested(ffi::PyBUF_FORMAT) {
                true => self.format.as_ptr().cast_mut(),
                false => std::ptr::null_mut(),
            };
            (*view).ndim = self.shape.len() as c_int;
            (*view).shape = list(ffi::PyBUF_ND, self.shape);
            (*view).strides = list(ffi::PyBUF_STRIDES, self.strides);
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = std::ptr::null_mut();
        }
    }
}

fn released(py: Python<'_>, reason: Unusable) -> PyErr {
    unusable_error(py, "view", reason)
}
