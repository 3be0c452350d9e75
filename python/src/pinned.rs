//! [`Pinned`]: an object that Python reads in place, and how long it stays.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use moontide_client::ObjectRef;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::process::{Gone, OfProcess, gone};

/// An object's bytes. They stay where they are until this is released or dropped; it is not released while somebody has
/// a buffer of it.
#[derive(Debug)]
pub(crate) struct Pinned {
    object: OfProcess<Arc<ObjectRef>>,
    /// Buffers that were lent and not given back.
    buffers: AtomicUsize,
}

impl Pinned {
    pub(crate) fn new(object: ObjectRef) -> Pinned {
        Pinned { object: OfProcess::new(Arc::new(object)), buffers: AtomicUsize::new(0) }
    }

    /// The object, for a moment.
    pub(crate) fn object(&self, py: Python<'_>) -> PyResult<Arc<ObjectRef>> {
        self.object.with(Arc::clone).map_err(|why| released(py, why))
    }

    /// Where the bytes begin, and how many there are, for somebody who does not say when it is done: from now on they
    /// stay there until this is dropped.
    pub(crate) fn place(&self, py: Python<'_>) -> PyResult<(*const u8, usize)> {
        let placed = self.object.with(|object| {
            self.buffers.fetch_add(1, Ordering::SeqCst);
            (object.as_ptr(), object.len())
        });
        placed.map_err(|why| released(py, why))
    }

    pub(crate) fn release(&self) -> PyResult<()> {
        let released = self.object.take_unless(|| match self.buffers.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(PyBufferError::new_err(
                "its memory is lent, to an array, a memoryview or as an address; it is given back when the view and all of \
                 them are dropped",
            )),
        });
        released.map(drop)
    }

    /// Fills a buffer with bytes of the object from `offset` on, read-only, in the given shape.
    ///
    /// # Safety
    /// `view` is what Python passed to `__getbuffer__`; `layout` lives as long as `owner`, and fits the object.
    pub(crate) unsafe fn lend(
        &self,
        owner: &Bound<'_, PyAny>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
        offset: usize,
        layout: Layout<'_>,
    ) -> PyResult<()> {
        let py = owner.py();
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err(
                "objects of the store are read-only; copy what is to be changed",
            ));
        }
        let is_row_by_row_only = layout.shape.iter().filter(|&&len| len > 1).count() > 1;
        if flags & ffi::PyBUF_F_CONTIGUOUS == ffi::PyBUF_F_CONTIGUOUS && is_row_by_row_only {
            return Err(PyBufferError::new_err("the elements lie row by row, not column by column"));
        }
        let lent = self.object.with(|object| {
            self.buffers.fetch_add(1, Ordering::SeqCst);
            let bytes = &object[offset..];
            (bytes.as_ptr(), bytes.len())
        });
        let (start, len) = lent.map_err(|why| released(py, why))?;
        // SAFETY: the caller's buffer and layout.
        unsafe { layout.fill(owner, view, flags, Memory { start, len, readonly: true }) };
        Ok(())
    }

    /// A buffer came back.
    pub(crate) fn given_back(&self) {
        self.buffers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How a buffer's elements are laid out.
pub(crate) struct Layout<'a> {
    pub(crate) format: &'static CStr,
    pub(crate) item_bytes: usize,
    pub(crate) shape: &'a [isize],
    pub(crate) strides: &'a [isize],
}

/// Which memory a buffer shows.
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
    /// `view` is what Python passed to `__getbuffer__`; the layout lives as long as `owner`, who keeps the memory, and fits
    /// it; whoever asked with these flags can be given it.
    pub(crate) unsafe fn fill(
        &self,
        owner: &Bound<'_, PyAny>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
        memory: Memory,
    ) {
        let asked = |flag: c_int| flags & flag == flag;
        let list = |flag: c_int, list: &[isize]| match asked(flag) {
            true => list.as_ptr().cast_mut(),
            false => std::ptr::null_mut(),
        };
        // SAFETY: the caller's buffer; everything that is put into it lives as long as the owner, of which the buffer
        // holds a reference.
        unsafe {
            (*view).obj = owner.clone().into_ptr();
            (*view).buf = memory.start.cast_mut().cast::<c_void>();
            (*view).len = memory.len as isize;
            (*view).readonly = c_int::from(memory.readonly);
            (*view).itemsize = self.item_bytes as isize;
            (*view).format = match asked(ffi::PyBUF_FORMAT) {
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

fn released(py: Python<'_>, why: Gone) -> PyErr {
    gone(py, "view", why)
}
