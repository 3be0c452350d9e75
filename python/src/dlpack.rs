//! DLPack: how array libraries lend each other memory. Its structures, a borrowed tensor, and a lent one.
//!
//! <https://dmlc.github.io/dlpack/latest/> describes both forms of the capsule: the older one, and the one with a version,
//! which can say that memory must not be written.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use moontide_types::tensor::Dtype;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::errors;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Debug)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
#[derive(Debug)]
struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

#[repr(C)]
#[derive(Debug)]
struct DlManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

const CPU: i32 = 1;
/// Memory that a CPU reads and writes like its own: pinned by CUDA, by ROCm.
const LIKE_CPU: [i32; 3] = [CPU, 3, 11];
const READ_ONLY: u64 = 1;
const IS_COPY: u64 = 2;

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// The code of a type; its bits follow from its length.
fn code(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => 0,
        Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 | Dtype::Uint64 => 1,
        Dtype::Float16 | Dtype::Float32 | Dtype::Float64 => 2,
        Dtype::Bfloat16 => 4,
        Dtype::Complex64 | Dtype::Complex128 => 5,
        Dtype::Bool => 6,
        Dtype::Float8E4m3fn => 10,
        Dtype::Float8E5m2 => 12,
        _ => unreachable!("every type has a code"),
    }
}

fn dtype(of: DlDataType) -> Option<Dtype> {
    Dtype::ALL
        .iter()
        .copied()
        .find(|&dtype| code(dtype) == of.code && dtype.bytes() * 8 == usize::from(of.bits))
}

// -------------------------------------------------------------------------------------------------------- borrowed

/// A tensor that another library lends, until it is dropped.
#[derive(Debug)]
pub(crate) struct Borrowed {
    managed: Managed,
}

#[derive(Debug)]
enum Managed {
    Plain(NonNull<DlManagedTensor>),
    Versioned(NonNull<DlManagedTensorVersioned>),
}

// SAFETY: the structure is ours until its deleter is called, which any thread may do.
unsafe impl Send for Borrowed {}
// SAFETY: only read.
unsafe impl Sync for Borrowed {}

/// What is lent.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) start: *mut u8,
    pub(crate) shape: Vec<usize>,
    /// In bytes.
    pub(crate) strides: Vec<isize>,
    pub(crate) item_bytes: usize,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) readonly: bool,
}

impl Borrowed {
    /// Borrows from an object that has `__dlpack__`.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
        let py = object.py();
        let (device, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if !LIKE_CPU.contains(&device) {
            return Err(PyTypeError::new_err(
                "the tensor is not in memory that the CPU can read; copy it to the CPU first, e.g. with tensor.cpu()",
            ));
        }
        let newest = PyDict::new(py);
        newest.set_item("max_version", (1, 0))?;
        let capsule = match object.call_method(intern!(py, "__dlpack__"), (), Some(&newest)) {
            // Older libraries do not know the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                object.call_method0(intern!(py, "__dlpack__"))?
            }
            other => other?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let taken = |name: &CStr, used: &'static CStr| -> Option<NonNull<c_void>> {
            // SAFETY: a capsule, and names that end with a zero; a wrong name gives null and an error.
            unsafe {
                if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
                    return None;
                }
                let inside = NonNull::new(ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))?;
                // Ours from here on: the capsule's own destructor leaves it alone by its name.
                (ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) == 0).then_some(inside)
            }
        };
        if let Some(inside) = taken(VERSIONED, VERSIONED_USED) {
            let managed: NonNull<DlManagedTensorVersioned> = inside.cast();
            // SAFETY: version and deleter come first in every version.
            let major = unsafe { managed.as_ref().major };
            let borrowed = Borrowed { managed: Managed::Versioned(managed) };
            return match major {
                1 => Ok(borrowed),
                other => Err(PyBufferError::new_err(format!("DLPack {other} is not known here"))),
            };
        }
        match taken(PLAIN, PLAIN_USED) {
            Some(inside) => Ok(Borrowed { managed: Managed::Plain(inside.cast()) }),
            None => Err(PyBufferError::new_err("__dlpack__ gave no tensor")),
        }
    }

    pub(crate) fn lent(&self) -> PyResult<Lent> {
        // SAFETY: the structure is valid until the deleter is called.
        let (tensor, readonly) = unsafe {
            match &self.managed {
                Managed::Plain(managed) => (&managed.as_ref().tensor, false),
                Managed::Versioned(managed) => {
                    (&managed.as_ref().tensor, managed.as_ref().flags & READ_ONLY != 0)
                }
            }
        };
        let wrong = |what: &str| errors::argument(format!("a DLPack tensor with {what}"));
        let bits = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes);
        if bits == 0 || !bits.is_multiple_of(8) {
            return Err(wrong("elements that are no whole bytes"));
        }
        let item_bytes = bits / 8;
        let dims = usize::try_from(tensor.ndim).map_err(|_| wrong("a negative number of dimensions"))?;
        let shape: Vec<usize> = match dims {
            0 => Vec::new(),
            // SAFETY: a tensor with dimensions has a shape of as many numbers.
            _ => unsafe { std::slice::from_raw_parts(tensor.shape, dims) }
                .iter()
                .map(|&len| usize::try_from(len).map_err(|_| wrong("a negative length")))
                .collect::<PyResult<_>>()?,
        };
        let strides = if dims == 0 || tensor.strides.is_null() {
            super::array::row_strides(&shape, item_bytes)
        } else {
            // SAFETY: as many numbers as dimensions.
            unsafe { std::slice::from_raw_parts(tensor.strides, dims) }
                .iter()
                .map(|&stride| (stride as isize).wrapping_mul(item_bytes as isize))
                .collect()
        };
        let start = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let dtype = (tensor.dtype.lanes == 1).then(|| dtype(tensor.dtype)).flatten();
        Ok(Lent { start, shape, strides, item_bytes, dtype, readonly })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // The other library's deleter usually drops Python objects: not when the interpreter is gone.
        Python::try_attach(|_| {
            // SAFETY: the structure is ours, and this is its end.
            unsafe {
                match self.managed {
                    Managed::Plain(managed) => {
                        if let Some(delete) = managed.as_ref().deleter {
                            delete(managed.as_ptr());
                        }
                    }
                    Managed::Versioned(managed) => {
                        if let Some(delete) = managed.as_ref().deleter {
                            delete(managed.as_ptr());
                        }
                    }
                }
            }
        });
    }
}

// ------------------------------------------------------------------------------------------------------------ lent

/// What `__dlpack_device__` says: memory of this host.
pub(crate) const DEVICE: (i32, i32) = (CPU, 0);

/// What a lent tensor is kept alive by, and where its numbers stand.
struct Keeper {
    _owner: Option<Py<PyAny>>,
    copy: Vec<u8>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// What a library asks for when it borrows.
pub(crate) struct Request {
    pub(crate) max_version: Option<(u32, u32)>,
    pub(crate) device: Option<(i32, i32)>,
    pub(crate) copy: Option<bool>,
}

/// A capsule that lends memory of `owner`, read-only, row by row; or one with a copy, if that is asked for. Only the form
/// with a version can say the former.
pub(crate) fn lend<'py>(
    owner: &Bound<'py, PyAny>,
    start: impl FnOnce() -> PyResult<*const u8>,
    dtype: Dtype,
    shape: &[u64],
    request: &Request,
) -> PyResult<Bound<'py, PyAny>> {
    let shape: Vec<usize> = shape.iter().map(|&len| len as usize).collect();
    let strides = super::array::row_strides(&shape, dtype.bytes());
    lend_strided(owner, start, Elements { dtype, shape: &shape, strides: &strides, readonly: true }, request)
}

/// What is lent, and how it lies.
pub(crate) struct Elements<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    /// In bytes; whole elements.
    pub(crate) strides: &'a [isize],
    pub(crate) readonly: bool,
}

/// The same for elements with gaps between them, and for memory that may be written.
pub(crate) fn lend_strided<'py>(
    owner: &Bound<'py, PyAny>,
    start: impl FnOnce() -> PyResult<*const u8>,
    elements: Elements<'_>,
    request: &Request,
) -> PyResult<Bound<'py, PyAny>> {
    let Elements { dtype, shape, strides, readonly } = elements;
    if request.device.is_some_and(|device| device != DEVICE) {
        return Err(PyBufferError::new_err(
            "the memory is this host's; copy it to the device after borrowing it",
        ));
    }
    if request.max_version.is_none_or(|(major, _)| major < 1) {
        return Err(PyBufferError::new_err(
            "the memory may be read-only, and the caller's DLPack is too old to be told so; use .numpy() or a copy",
        ));
    }
    let start = start()?;
    let wants_copy = request.copy == Some(true);
    let copy = match wants_copy {
        // SAFETY: the elements are there, and the owner, whom the caller holds, keeps them.
        true => unsafe { super::array::collect(start, shape, strides, dtype.bytes()) }?,
        false => Vec::new(),
    };
    let in_elements = |stride: &isize| (*stride / dtype.bytes() as isize) as i64;
    let mut keeper = Box::new(Keeper {
        _owner: (!wants_copy).then(|| owner.clone().unbind()),
        copy,
        shape: shape.iter().map(|&len| len as i64).collect(),
        strides: match wants_copy {
            true => super::array::row_strides(shape, 1).into_iter().map(|stride| stride as i64).collect(),
            false => strides.iter().map(in_elements).collect(),
        },
    });
    let data: *mut u8 = match wants_copy {
        true => keeper.copy.as_mut_ptr(),
        false => start.cast_mut(),
    };
    let tensor = DlTensor {
        data: data.cast(),
        device: DlDevice { device_type: CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: DlDataType { code: code(dtype), bits: (dtype.bytes() * 8) as u8, lanes: 1 },
        shape: keeper.shape.as_mut_ptr(),
        strides: keeper.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Box::into_raw(Box::new(DlManagedTensorVersioned {
        major: 1,
        minor: 0,
        manager: Box::into_raw(keeper).cast(),
        deleter: Some(delete_lent),
        flags: match (wants_copy, readonly) {
            (true, _) => IS_COPY,
            (false, true) => READ_ONLY,
            (false, false) => 0,
        },
        tensor,
    }));
    // SAFETY: a pointer to a structure that the capsule owns until somebody takes it and changes the name.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), VERSIONED.as_ptr(), Some(capsule_dropped)) };
    if capsule.is_null() {
        // SAFETY: made just above, and nobody else has it.
        unsafe { delete_lent(managed) };
        return Err(PyErr::fetch(owner.py()));
    }
    // SAFETY: a new reference.
    Ok(unsafe { Bound::from_owned_ptr(owner.py(), capsule) })
}

/// Nobody took what the capsule holds.
unsafe extern "C" fn capsule_dropped(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with a capsule of ours; the name says whether its content still is.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
            let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            delete_lent(managed.cast());
        }
    }
}

/// Whoever borrowed it is done. May be called on any thread.
unsafe extern "C" fn delete_lent(managed: *mut DlManagedTensorVersioned) {
    // SAFETY: both were made by `lend`, and this is called once.
    unsafe {
        let managed = Box::from_raw(managed);
        let keeper = Box::from_raw(managed.manager.cast::<Keeper>());
        // Not when the interpreter is gone: its objects are, too. Within, so that the memory is given back now.
        let mut keeper = Some(keeper);
        if Python::try_attach(|_| drop(keeper.take())).is_none() {
            std::mem::forget(keeper);
        }
    }
}
