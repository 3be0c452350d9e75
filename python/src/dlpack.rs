//! DLPack, the memory-sharing protocol of array libraries: its structures, imported tensors and exported tensors.
//!
//! <https://dmlc.github.io/dlpack/latest/> describes both forms of the capsule: the unversioned one, and the versioned
//! one, which has a read-only flag.

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
/// Devices whose memory the CPU can access: CPU, host memory pinned by CUDA, host memory pinned by ROCm.
const LIKE_CPU: [i32; 3] = [CPU, 3, 11];
const READ_ONLY: u64 = 1;
const IS_COPY: u64 = 2;

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// Returns the DLPack code of a type. Its bits follow from its size.
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

// -------------------------------------------------------------------------------------------------------- imported

/// A tensor of another library, released when dropped.
#[derive(Debug)]
pub(crate) struct Borrowed {
    managed: Managed,
}

#[derive(Debug)]
enum Managed {
    Plain(NonNull<DlManagedTensor>),
    Versioned(NonNull<DlManagedTensorVersioned>),
}

// SAFETY: this value owns the structure until its deleter is called, which any thread may do.
unsafe impl Send for Borrowed {}
// SAFETY: only read.
unsafe impl Sync for Borrowed {}

/// Memory and layout of a borrowed tensor.
#[derive(Debug)]
pub(crate) struct BorrowedTensor {
    pub(crate) start: *mut u8,
    pub(crate) shape: Vec<usize>,
    /// In bytes.
    pub(crate) strides: Vec<isize>,
    pub(crate) item_bytes: usize,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) readonly: bool,
}

impl Borrowed {
    /// Imports the tensor of an object that has `__dlpack__`.
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
            // Older libraries do not have the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                object.call_method0(intern!(py, "__dlpack__"))?
            }
            other => other?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let taken = |name: &CStr, used: &'static CStr| -> Option<NonNull<c_void>> {
            // SAFETY: a capsule, and zero-terminated names; a wrong name yields null and an error.
            unsafe {
                if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
                    return None;
                }
                let content = NonNull::new(ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))?;
                // This value owns it now: the destructor of the capsule checks the name and does nothing.
                (ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) == 0).then_some(content)
            }
        };
        if let Some(content) = taken(VERSIONED, VERSIONED_USED) {
            let managed: NonNull<DlManagedTensorVersioned> = content.cast();
            // SAFETY: version and deleter come first in every version.
            let major = unsafe { managed.as_ref().major };
            let borrowed = Borrowed { managed: Managed::Versioned(managed) };
            return match major {
                1 => Ok(borrowed),
                other => Err(PyBufferError::new_err(format!("DLPack version {other} is not supported"))),
            };
        }
        match taken(PLAIN, PLAIN_USED) {
            Some(content) => Ok(Borrowed { managed: Managed::Plain(content.cast()) }),
            None => Err(PyBufferError::new_err("__dlpack__ returned no tensor")),
        }
    }

    pub(crate) fn tensor(&self) -> PyResult<BorrowedTensor> {
        // SAFETY: the structure is valid until the deleter is called.
        let (tensor, readonly) = unsafe {
            match &self.managed {
                Managed::Plain(managed) => (&managed.as_ref().tensor, false),
                Managed::Versioned(managed) => {
                    (&managed.as_ref().tensor, managed.as_ref().flags & READ_ONLY != 0)
                }
            }
        };
        let wrong = |what: &str| errors::argument(format!("invalid DLPack tensor: {what}"));
        let bits = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes);
        if bits == 0 || !bits.is_multiple_of(8) {
            return Err(wrong("element size is not a whole number of bytes"));
        }
        let item_bytes = bits / 8;
        let dims = usize::try_from(tensor.ndim).map_err(|_| wrong("negative number of dimensions"))?;
        let shape: Vec<usize> = match dims {
            0 => Vec::new(),
            // SAFETY: the shape of a tensor has one number per dimension.
            _ => unsafe { std::slice::from_raw_parts(tensor.shape, dims) }
                .iter()
                .map(|&len| usize::try_from(len).map_err(|_| wrong("negative length")))
                .collect::<PyResult<_>>()?,
        };
        let strides = if dims == 0 || tensor.strides.is_null() {
            super::array::row_strides(&shape, item_bytes)
        } else {
            // SAFETY: one number per dimension.
            unsafe { std::slice::from_raw_parts(tensor.strides, dims) }
                .iter()
                .map(|&stride| (stride as isize).wrapping_mul(item_bytes as isize))
                .collect()
        };
        let start = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let dtype = (tensor.dtype.lanes == 1).then(|| dtype(tensor.dtype)).flatten();
        Ok(BorrowedTensor { start, shape, strides, item_bytes, dtype, readonly })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // The deleter of the other library usually drops Python objects, so it is not called after the interpreter
        // ended.
        Python::try_attach(|_| {
            // SAFETY: this value owns the structure, and does not use it after this call.
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

// -------------------------------------------------------------------------------------------------------- exported

/// Result of `__dlpack_device__`: host memory.
pub(crate) const DEVICE: (i32, i32) = (CPU, 0);

/// Owner of the memory of an exported tensor, and its shape and strides.
struct TensorOwner {
    _owner: Option<Py<PyAny>>,
    copy: Vec<u8>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// Arguments of `__dlpack__`.
pub(crate) struct Request {
    pub(crate) max_version: Option<(u32, u32)>,
    pub(crate) device: Option<(i32, i32)>,
    pub(crate) copy: Option<bool>,
}

/// Returns a capsule that exports memory of `owner`, read-only and row-major, or a copy of it on request. Only the
/// versioned form has a read-only flag.
pub(crate) fn export<'py>(
    owner: &Bound<'py, PyAny>,
    start: impl FnOnce() -> PyResult<*const u8>,
    dtype: Dtype,
    shape: &[u64],
    request: &Request,
) -> PyResult<Bound<'py, PyAny>> {
    let shape: Vec<usize> = shape.iter().map(|&len| len as usize).collect();
    let strides = super::array::row_strides(&shape, dtype.bytes());
    export_strided(
        owner,
        start,
        Elements { dtype, shape: &shape, strides: &strides, readonly: true },
        request,
    )
}

/// Type and layout of exported elements.
pub(crate) struct Elements<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    /// In bytes; multiples of the element size.
    pub(crate) strides: &'a [isize],
    pub(crate) readonly: bool,
}

/// As [`export`], for elements with strides and for writable memory.
pub(crate) fn export_strided<'py>(
    owner: &Bound<'py, PyAny>,
    start: impl FnOnce() -> PyResult<*const u8>,
    elements: Elements<'_>,
    request: &Request,
) -> PyResult<Bound<'py, PyAny>> {
    let Elements { dtype, shape, strides, readonly } = elements;
    if request.device.is_some_and(|device| device != DEVICE) {
        return Err(PyBufferError::new_err(
            "the memory is host memory; import it on the CPU and copy it to the device",
        ));
    }
    if request.max_version.is_none_or(|(major, _)| major < 1) {
        return Err(PyBufferError::new_err(
            "the caller's DLPack version has no read-only flag, and the memory may be read-only; use .numpy() or a copy",
        ));
    }
    let start = start()?;
    let wants_copy = request.copy == Some(true);
    let copy = match wants_copy {
        // SAFETY: the elements exist, and the owner, which the caller references, keeps them alive.
        true => unsafe { super::array::collect(start, shape, strides, dtype.bytes()) }?,
        false => Vec::new(),
    };
    let in_elements = |stride: &isize| (*stride / dtype.bytes() as isize) as i64;
    let mut contents = Box::new(TensorOwner {
        _owner: (!wants_copy).then(|| owner.clone().unbind()),
        copy,
        shape: shape.iter().map(|&len| len as i64).collect(),
        strides: match wants_copy {
            true => super::array::row_strides(shape, 1).into_iter().map(|stride| stride as i64).collect(),
            false => strides.iter().map(in_elements).collect(),
        },
    });
    let data: *mut u8 = match wants_copy {
        true => contents.copy.as_mut_ptr(),
        false => start.cast_mut(),
    };
    let tensor = DlTensor {
        data: data.cast(),
        device: DlDevice { device_type: CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: DlDataType { code: code(dtype), bits: (dtype.bytes() * 8) as u8, lanes: 1 },
        shape: contents.shape.as_mut_ptr(),
        strides: contents.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Box::into_raw(Box::new(DlManagedTensorVersioned {
        major: 1,
        minor: 0,
        manager: Box::into_raw(contents).cast(),
        deleter: Some(delete_exported),
        flags: match (wants_copy, readonly) {
            (true, _) => IS_COPY,
            (false, true) => READ_ONLY,
            (false, false) => 0,
        },
        tensor,
    }));
    // SAFETY: a pointer to a structure that the capsule owns until a consumer takes it and changes the name.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), VERSIONED.as_ptr(), Some(capsule_dropped)) };
    if capsule.is_null() {
        // SAFETY: created above, and no other code has a pointer to it.
        unsafe { delete_exported(managed) };
        return Err(PyErr::fetch(owner.py()));
    }
    // SAFETY: a new reference.
    Ok(unsafe { Bound::from_owned_ptr(owner.py(), capsule) })
}

/// Destructor of the capsule: deletes the tensor if no consumer took it.
unsafe extern "C" fn capsule_dropped(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with a capsule of this module; its name tells whether it still owns the tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
            let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            delete_exported(managed.cast());
        }
    }
}

/// Deleter of an exported tensor. Can be called on any thread.
unsafe extern "C" fn delete_exported(managed: *mut DlManagedTensorVersioned) {
    // SAFETY: `export_strided` created both, and this is called once.
    unsafe {
        let managed = Box::from_raw(managed);
        let contents = Box::from_raw(managed.manager.cast::<TensorOwner>());
        // Dropped while attached, so that the memory is freed now. After the interpreter ended its objects no longer
        // exist, so the value is leaked.
        let mut contents = Some(contents);
        if Python::try_attach(|_| drop(contents.take())).is_none() {
            std::mem::forget(contents);
        }
    }
}
