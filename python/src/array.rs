//! [`Array`]: memory of a Python object, borrowed through the buffer protocol, DLPack or `__array_interface__`.

use std::ffi::CStr;

use moontide_types::tensor::Dtype;
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::dlpack::Borrowed;
use crate::errors;

/// Borrowed memory of a Python object. Keeps a reference to the object.
pub(crate) struct Array {
    start: *mut u8,
    shape: Vec<usize>,
    /// In bytes.
    strides: Vec<isize>,
    item_bytes: usize,
    /// Element type, if it is a known one.
    pub(crate) dtype: Option<Dtype>,
    readonly: bool,
    _owner: BufferOwner,
}

#[allow(dead_code)] // held, not read
enum BufferOwner {
    Bytes(Py<PyBytes>),
    Buffer(Buffer),
    Tensor(Borrowed),
    Object(Py<PyAny>),
}

// SAFETY: the memory stays valid as long as the owner is referenced; the caller must prevent concurrent writes, as in
// C.
unsafe impl Send for Array {}
// SAFETY: as above.
unsafe impl Sync for Array {}

impl Array {
    /// Borrows an object's memory.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let array = Array::borrow(object)?;
        // Checked for every owner: lengths computed from the shape must not overflow.
        let bytes = array.shape.iter().try_fold(array.item_bytes, |bytes, &len| bytes.checked_mul(len));
        match bytes.filter(|&bytes| bytes <= isize::MAX as usize) {
            Some(_) if array.strides.len() == array.shape.len() => Ok(array),
            _ => Err(errors::argument("array shape is invalid: its size in bytes overflows")),
        }
    }

    fn borrow(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            let content = bytes.as_bytes();
            return Ok(Array {
                start: content.as_ptr().cast_mut(),
                shape: vec![content.len()],
                strides: vec![1],
                item_bytes: 1,
                dtype: Some(Dtype::Uint8),
                readonly: true,
                _owner: BufferOwner::Bytes(bytes.clone().unbind()),
            });
        }
        let py = object.py();
        let buffer_error = match Buffer::of(object) {
            Ok(buffer) => return Array::of_buffer(buffer),
            Err(error) => error,
        };
        if object.hasattr(intern!(py, "__dlpack__"))? {
            match Array::of_dlpack(object) {
                // numpy exports only standard types through DLPack, and fails for the others.
                Err(_) if object.hasattr(intern!(py, "__array_interface__"))? => {}
                other => return other,
            }
        }
        if object.hasattr(intern!(py, "__array_interface__"))? {
            return Array::of_interface(object);
        }
        match buffer_error.is_instance_of::<PyTypeError>(py) {
            true => Err(PyTypeError::new_err(format!(
                "bytes, a buffer or an array is expected, not {}",
                object.get_type().name()?
            ))),
            false => Err(buffer_error),
        }
    }

    fn of_buffer(buffer: Buffer) -> PyResult<Array> {
        let raw = &*buffer.0;
        if !raw.suboffsets.is_null() {
            return Err(errors::argument(
                "the buffer has suboffsets (a table of pointers); copy it to contiguous memory first",
            ));
        }
        let dims = raw.ndim as usize;
        let item_bytes = raw.itemsize as usize;
        // SAFETY: the array has one number per dimension.
        let numbers = |start: *mut isize| unsafe { std::slice::from_raw_parts(start, dims) };
        let shape: Vec<usize> = match (dims, raw.shape.is_null()) {
            (0, _) => Vec::new(),
            (1, true) => vec![raw.len as usize / item_bytes.max(1)],
            (_, true) => return Err(errors::argument("the buffer has several dimensions but no shape")),
            (_, false) => numbers(raw.shape).iter().map(|&len| len as usize).collect(),
        };
        let strides = match dims > 0 && !raw.strides.is_null() {
            true => numbers(raw.strides).to_vec(),
            // Without strides, the protocol defines row-major order.
            false => row_strides(&shape, item_bytes),
        };
        let format = match raw.format.is_null() {
            true => c"B",
            // SAFETY: zero-terminated text that lives as long as the buffer.
            false => unsafe { CStr::from_ptr(raw.format) },
        };
        // Names of fields are between colons.
        if format.to_bytes().split(|&byte| byte == b':').step_by(2).any(|types| types.contains(&b'O')) {
            return Err(objects());
        }
        Ok(Array {
            start: raw.buf.cast(),
            shape,
            strides,
            item_bytes,
            dtype: dtype_of_format(format, item_bytes),
            readonly: raw.readonly != 0,
            _owner: BufferOwner::Buffer(buffer),
        })
    }

    fn of_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let borrowed = Borrowed::of(object)?;
        let tensor = borrowed.tensor()?;
        Ok(Array {
            start: tensor.start,
            shape: tensor.shape,
            strides: tensor.strides,
            item_bytes: tensor.item_bytes,
            dtype: tensor.dtype,
            readonly: tensor.readonly,
            _owner: BufferOwner::Tensor(borrowed),
        })
    }

    fn of_interface(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        let found = object.getattr(intern!(py, "__array_interface__"))?.cast_into::<PyDict>()?;
        let field = |name: &str| {
            found
                .get_item(name)?
                .filter(|value| !value.is_none())
                .ok_or_else(|| errors::argument(format!("__array_interface__ without {name}")))
        };
        let (start, readonly): (usize, bool) = field("data")?.extract()?;
        let shape: Vec<usize> = field("shape")?.extract()?;
        let typestr: String = field("typestr")?.extract()?;
        let (item_bytes, by_type) = type_of_typestr(&typestr)?;
        // The name of a type does not include the byte order.
        let is_native = !typestr.starts_with('>') || item_bytes == 1;
        let strides: Vec<isize> = match field("strides") {
            Ok(strides) => strides.extract()?,
            Err(_) => row_strides(&shape, item_bytes),
        };
        if strides.len() != shape.len() {
            return Err(errors::argument(
                "__array_interface__ has a different number of strides and lengths",
            ));
        }
        // Types of ml_dtypes are not standard numpy types, but have a name.
        let named = || -> Option<Dtype> {
            let name: String = object.getattr("dtype").ok()?.getattr("name").ok()?.extract().ok()?;
            Dtype::from_name(&name).filter(|dtype| dtype.bytes() == item_bytes)
        };
        Ok(Array {
            start: start as *mut u8,
            shape,
            strides,
            item_bytes,
            dtype: by_type.or_else(|| is_native.then(named).flatten()),
            readonly,
            // The memory belongs to the object or to the dictionary.
            _owner: BufferOwner::Object((object, found).into_pyobject(py)?.into_any().unbind()),
        })
    }

    /// Bytes of all elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.item_bytes
    }

    pub(crate) fn shape(&self) -> Vec<u64> {
        self.shape.iter().map(|&len| len as u64).collect()
    }

    /// Whether the elements are in row-major order without gaps.
    fn is_contiguous(&self) -> bool {
        if self.len() == 0 {
            return true;
        }
        let expected = row_strides(&self.shape, self.item_bytes);
        let mut pairs = self.shape.iter().zip(self.strides.iter().zip(&expected));
        pairs.all(|(&len, (stride, expected))| len == 1 || stride == expected)
    }

    /// Returns the bytes in row-major order. Non-contiguous elements are copied first.
    pub(crate) fn into_source(self, py: Python<'_>) -> PyResult<Source> {
        match self.is_contiguous() {
            true => Ok(Source::Borrowed(self)),
            false => py.detach(|| self.collect()).map(Source::Collected),
        }
    }

    fn collect(&self) -> PyResult<Vec<u8>> {
        // SAFETY: the owner exports an element at every index within the shape, and is referenced.
        unsafe { collect(self.start, &self.shape, &self.strides, self.item_bytes) }
    }

    /// Returns the bytes for writing.
    pub(crate) fn into_target(self) -> PyResult<Target> {
        if self.readonly {
            return Err(errors::argument("the memory is read-only; pass a writable buffer"));
        }
        if !self.is_contiguous() {
            return Err(errors::argument(
                "the elements are not contiguous in memory; pass a contiguous array",
            ));
        }
        Ok(Target(self))
    }
}

/// Copies non-contiguous elements, in row-major order.
///
/// # Safety
/// There is an element at every index within the shape.
pub(crate) unsafe fn collect(
    start: *const u8,
    shape: &[usize],
    strides: &[isize],
    item_bytes: usize,
) -> PyResult<Vec<u8>> {
    let len = shape.iter().product::<usize>() * item_bytes;
    let mut all = Vec::new();
    all.try_reserve_exact(len).map_err(|_| {
        PyMemoryError::new_err(format!(
            "out of memory: cannot allocate {len} bytes to make the array contiguous"
        ))
    })?;
    if len == 0 {
        return Ok(all);
    }
    // Adjacent elements at the end of a row are copied together.
    let mut dims = shape.len();
    let mut run = item_bytes;
    while dims > 0 && (strides[dims - 1] == run as isize || shape[dims - 1] == 1) {
        run *= shape[dims - 1];
        dims -= 1;
    }
    let mut index = vec![0usize; dims];
    loop {
        let offset: isize = index.iter().zip(strides).map(|(&at, &stride)| at as isize * stride).sum();
        // SAFETY: the caller guarantees an element at every index; no dimension is empty.
        let elements = unsafe { std::slice::from_raw_parts(start.wrapping_offset(offset), run) };
        all.extend_from_slice(elements);
        // Advances the index, last dimension first.
        let Some(at) = (0..dims).rev().find(|&at| index[at] + 1 < shape[at]) else { return Ok(all) };
        index[at] += 1;
        index[at + 1..].fill(0);
    }
}

/// Bytes to store.
pub(crate) enum Source {
    Borrowed(Array),
    Collected(Vec<u8>),
}

impl Source {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Source> {
        Array::of(object)?.into_source(object.py())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Source::Borrowed(array) if array.len() == 0 => &[],
            // SAFETY: contiguous memory, kept alive by the array. A write during the call yields an object that does
            // not match its digest, and that the store never returns.
            Source::Borrowed(array) => unsafe { std::slice::from_raw_parts(array.start, array.len()) },
            Source::Collected(bytes) => bytes,
        }
    }
}

/// Memory to fill.
pub(crate) struct Target(Array);

impl Target {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Target> {
        Array::of(object)?.into_target()
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self.0.len() {
            0 => &mut [],
            // SAFETY: contiguous writable memory, kept alive by the array. Concurrent readers see partial content, as
            // with every call that fills a buffer.
            len => unsafe { std::slice::from_raw_parts_mut(self.0.start, len) },
        }
    }
}

/// A `Py_buffer`, released when dropped.
struct Buffer(Box<ffi::Py_buffer>);

impl Buffer {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        let mut raw = Box::new(ffi::Py_buffer::new());
        // SAFETY: a valid object, and a structure that does not move.
        match unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *raw, ffi::PyBUF_FULL_RO) } {
            0 => Ok(Buffer(raw)),
            _ => Err(PyErr::fetch(object.py())),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Skipped after the interpreter ended: its objects no longer exist.
        // SAFETY: Python filled it, and this releases it once.
        Python::try_attach(|_| unsafe { ffi::PyBuffer_Release(&mut *self.0) });
    }
}

fn objects() -> PyErr {
    PyTypeError::new_err(
        "an array of Python objects cannot be stored as bytes; convert it to a fixed-size type",
    )
}

/// Returns the size of an element for a typestr of `__array_interface__`, and its type if it is a known one.
fn type_of_typestr(typestr: &str) -> PyResult<(usize, Option<Dtype>)> {
    let wrong = || errors::argument(format!("__array_interface__ has an unsupported typestr {typestr:?}"));
    let [order, kind, digits @ ..] = typestr.as_bytes() else { return Err(wrong()) };
    let number: usize =
        std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or_else(wrong)?;
    let bytes = match kind {
        b'O' => return Err(objects()),
        // Characters of four bytes.
        b'U' => number.checked_mul(4).ok_or_else(wrong)?,
        _ => number,
    };
    if bytes == 0 {
        return Err(wrong());
    }
    let native = *order != b'>' || bytes == 1;
    let dtype = Dtype::ALL
        .iter()
        .copied()
        .find(|&dtype| typestr_of_dtype(dtype).as_bytes()[1..] == typestr.as_bytes()[1..]);
    // A void type of some length does not name a type.
    Ok((bytes, dtype.filter(|_| native && *kind != b'V')))
}

/// Returns the strides of row-major elements of `item_bytes` bytes.
pub(crate) fn row_strides(shape: &[usize], item_bytes: usize) -> Vec<isize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = item_bytes as isize;
    for (at, &len) in shape.iter().enumerate().rev() {
        strides[at] = stride;
        stride = stride.wrapping_mul(len as isize);
    }
    strides
}

/// Returns the type for a format of the buffer protocol.
fn dtype_of_format(format: &CStr, item_bytes: usize) -> Option<Dtype> {
    let format = format.to_str().ok()?;
    let code = match format.as_bytes() {
        [b'@' | b'=' | b'<', code @ ..] => code,
        [b'>' | b'!', code @ ..] if item_bytes == 1 => code,
        code => code,
    };
    let by_length = |types: &[Dtype]| types.iter().copied().find(|dtype| dtype.bytes() == item_bytes);
    match code {
        b"?" => Some(Dtype::Bool),
        b"b" | b"h" | b"i" | b"l" | b"q" | b"n" => {
            by_length(&[Dtype::Int8, Dtype::Int16, Dtype::Int32, Dtype::Int64])
        }
        b"B" | b"H" | b"I" | b"L" | b"Q" | b"N" | b"c" => {
            by_length(&[Dtype::Uint8, Dtype::Uint16, Dtype::Uint32, Dtype::Uint64])
        }
        b"e" | b"f" | b"d" => by_length(&[Dtype::Float16, Dtype::Float32, Dtype::Float64]),
        b"Zf" | b"Zd" => by_length(&[Dtype::Complex64, Dtype::Complex128]),
        _ => None,
    }
}

/// Returns the format of the buffer protocol for a type; `None` for types that it does not have.
pub(crate) fn format_of_dtype(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::Bool => c"?",
        Dtype::Uint8 => c"B",
        Dtype::Uint16 => c"H",
        Dtype::Uint32 => c"I",
        Dtype::Uint64 => c"Q",
        Dtype::Int8 => c"b",
        Dtype::Int16 => c"h",
        Dtype::Int32 => c"i",
        Dtype::Int64 => c"q",
        Dtype::Float16 => c"e",
        Dtype::Float32 => c"f",
        Dtype::Float64 => c"d",
        Dtype::Complex64 => c"Zf",
        Dtype::Complex128 => c"Zd",
        _ => return None,
    })
}

/// Returns the typestr of `__array_interface__` for a type. Types that numpy does not have are void types of their
/// size.
pub(crate) fn typestr_of_dtype(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bool => "|b1",
        Dtype::Uint8 => "|u1",
        Dtype::Uint16 => "<u2",
        Dtype::Uint32 => "<u4",
        Dtype::Uint64 => "<u8",
        Dtype::Int8 => "|i1",
        Dtype::Int16 => "<i2",
        Dtype::Int32 => "<i4",
        Dtype::Int64 => "<i8",
        Dtype::Float16 => "<f2",
        Dtype::Float32 => "<f4",
        Dtype::Float64 => "<f8",
        Dtype::Complex64 => "<c8",
        Dtype::Complex128 => "<c16",
        Dtype::Bfloat16 => "|V2",
        _ => "|V1",
    }
}
