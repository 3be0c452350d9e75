//! [`Array`]: memory that a Python object lends, by whichever of three ways it knows: the buffer protocol, DLPack,
//! `__array_interface__`.

use std::ffi::CStr;

use moontide_types::tensor::Dtype;
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::dlpack::Borrowed;
use crate::errors;

/// Memory of an object, which is held as long as this is.
pub(crate) struct Array {
    start: *mut u8,
    shape: Vec<usize>,
    /// In bytes.
    strides: Vec<isize>,
    item_bytes: usize,
    /// What an element is, if it is known.
    pub(crate) dtype: Option<Dtype>,
    readonly: bool,
    _lender: Lender,
}

#[allow(dead_code)] // held, not read
enum Lender {
    Bytes(Py<PyBytes>),
    Buffer(Buffer),
    Tensor(Borrowed),
    Object(Py<PyAny>),
}

// SAFETY: the memory stays as long as the lender is held; who writes it meanwhile is the caller's business, as in C.
unsafe impl Send for Array {}
// SAFETY: as above.
unsafe impl Sync for Array {}

impl Array {
    /// Borrows an object's memory.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let array = Array::lent_by(object)?;
        // Whatever a lender says, what is computed from it stays within bounds.
        let bytes = array.shape.iter().try_fold(array.item_bytes, |bytes, &len| bytes.checked_mul(len));
        match bytes.filter(|&bytes| bytes <= isize::MAX as usize) {
            Some(_) if array.strides.len() == array.shape.len() => Ok(array),
            _ => Err(errors::argument("an array of this shape has more bytes than there can be")),
        }
    }

    fn lent_by(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            let content = bytes.as_bytes();
            return Ok(Array {
                start: content.as_ptr().cast_mut(),
                shape: vec![content.len()],
                strides: vec![1],
                item_bytes: 1,
                dtype: Some(Dtype::Uint8),
                readonly: true,
                _lender: Lender::Bytes(bytes.clone().unbind()),
            });
        }
        let py = object.py();
        let refused = match Buffer::of(object) {
            Ok(buffer) => return Array::of_buffer(buffer),
            Err(error) => error,
        };
        if object.hasattr(intern!(py, "__dlpack__"))? {
            match Array::of_dlpack(object) {
                // numpy has it for ordinary types only, and says so in this way.
                Err(_) if object.hasattr(intern!(py, "__array_interface__"))? => {}
                other => return other,
            }
        }
        if object.hasattr(intern!(py, "__array_interface__"))? {
            return Array::of_interface(object);
        }
        match refused.is_instance_of::<PyTypeError>(py) {
            true => Err(PyTypeError::new_err(format!(
                "bytes, a buffer or an array is expected, not {}",
                object.get_type().name()?
            ))),
            false => Err(refused),
        }
    }

    fn of_buffer(buffer: Buffer) -> PyResult<Array> {
        let raw = &*buffer.0;
        if !raw.suboffsets.is_null() {
            return Err(errors::argument("the buffer is a table of pointers; copy it into one piece first"));
        }
        let dims = raw.ndim as usize;
        let item_bytes = raw.itemsize as usize;
        // SAFETY: as many numbers as dimensions, if there are any.
        let numbers = |start: *mut isize| unsafe { std::slice::from_raw_parts(start, dims) };
        let shape: Vec<usize> = match (dims, raw.shape.is_null()) {
            (0, _) => Vec::new(),
            (1, true) => vec![raw.len as usize / item_bytes.max(1)],
            (_, true) => return Err(errors::argument("a buffer with dimensions, but without a shape")),
            (_, false) => numbers(raw.shape).iter().map(|&len| len as usize).collect(),
        };
        let strides = match dims > 0 && !raw.strides.is_null() {
            true => numbers(raw.strides).to_vec(),
            // Row by row, says the protocol.
            false => row_strides(&shape, item_bytes),
        };
        let format = match raw.format.is_null() {
            true => c"B",
            // SAFETY: text that ends with a zero and stays as long as the buffer.
            false => unsafe { CStr::from_ptr(raw.format) },
        };
        // Fields have names between colons.
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
            _lender: Lender::Buffer(buffer),
        })
    }

    fn of_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let borrowed = Borrowed::of(object)?;
        let lent = borrowed.lent()?;
        Ok(Array {
            start: lent.start,
            shape: lent.shape,
            strides: lent.strides,
            item_bytes: lent.item_bytes,
            dtype: lent.dtype,
            readonly: lent.readonly,
            _lender: Lender::Tensor(borrowed),
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
        // The name of a type says nothing of the order of its bytes.
        let is_native = !typestr.starts_with('>') || item_bytes == 1;
        let strides: Vec<isize> = match field("strides") {
            Ok(strides) => strides.extract()?,
            Err(_) => row_strides(&shape, item_bytes),
        };
        if strides.len() != shape.len() {
            return Err(errors::argument("__array_interface__ with another number of strides than lengths"));
        }
        // Types that numpy does not know by itself have a name all the same: those of ml_dtypes.
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
            // What it points into is the object's, or the dictionary's.
            _lender: Lender::Object((object, found).into_pyobject(py)?.into_any().unbind()),
        })
    }

    /// Bytes of all elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.item_bytes
    }

    pub(crate) fn shape(&self) -> Vec<u64> {
        self.shape.iter().map(|&len| len as u64).collect()
    }

    /// Whether the elements follow each other row by row, without gaps.
    fn is_contiguous(&self) -> bool {
        if self.len() == 0 {
            return true;
        }
        let expected = row_strides(&self.shape, self.item_bytes);
        let mut pairs = self.shape.iter().zip(self.strides.iter().zip(&expected));
        pairs.all(|(&len, (stride, expected))| len == 1 || stride == expected)
    }

    /// The bytes, row by row; those of scattered elements are collected first.
    pub(crate) fn into_source(self, py: Python<'_>) -> PyResult<Source> {
        match self.is_contiguous() {
            true => Ok(Source::Lent(self)),
            false => py.detach(|| self.collect()).map(Source::Collected),
        }
    }

    fn collect(&self) -> PyResult<Vec<u8>> {
        // SAFETY: the lender says that there is an element at every index within the shape, and is held.
        unsafe { collect(self.start, &self.shape, &self.strides, self.item_bytes) }
    }

    /// The bytes, to be written.
    pub(crate) fn into_target(self) -> PyResult<Target> {
        if self.readonly {
            return Err(errors::argument("the memory is read-only; pass something that can be written"));
        }
        if !self.is_contiguous() {
            return Err(errors::argument(
                "the elements do not follow each other in memory; pass a contiguous array",
            ));
        }
        Ok(Target(self))
    }
}

/// The bytes of scattered elements, row by row.
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
    all.try_reserve_exact(len)
        .map_err(|_| PyMemoryError::new_err(format!("no memory to collect {len} bytes")))?;
    if len == 0 {
        return Ok(all);
    }
    // Elements that follow each other at the end of a row are taken together.
    let mut dims = shape.len();
    let mut run = item_bytes;
    while dims > 0 && (strides[dims - 1] == run as isize || shape[dims - 1] == 1) {
        run *= shape[dims - 1];
        dims -= 1;
    }
    let mut index = vec![0usize; dims];
    loop {
        let offset: isize = index.iter().zip(strides).map(|(&at, &stride)| at as isize * stride).sum();
        // SAFETY: an element at every index, says the caller; none of the dimensions is empty.
        let elements = unsafe { std::slice::from_raw_parts(start.wrapping_offset(offset), run) };
        all.extend_from_slice(elements);
        // The next index, the last dimension first.
        let Some(at) = (0..dims).rev().find(|&at| index[at] + 1 < shape[at]) else { return Ok(all) };
        index[at] += 1;
        index[at + 1..].fill(0);
    }
}

/// Bytes to be stored.
pub(crate) enum Source {
    Lent(Array),
    Collected(Vec<u8>),
}

impl Source {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Source> {
        Array::of(object)?.into_source(object.py())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Source::Lent(array) if array.len() == 0 => &[],
            // SAFETY: contiguous memory, held by the array. Whoever changes it during the call gets an object that no
            // digest matches, which nobody is given.
            Source::Lent(array) => unsafe { std::slice::from_raw_parts(array.start, array.len()) },
            Source::Collected(bytes) => bytes,
        }
    }
}

/// Memory to be filled.
pub(crate) struct Target(Array);

impl Target {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Target> {
        Array::of(object)?.into_target()
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self.0.len() {
            0 => &mut [],
            // SAFETY: contiguous memory that may be written, held by the array. Others who use it during the call see
            // bytes in the making, as with every call that fills a buffer.
            len => unsafe { std::slice::from_raw_parts_mut(self.0.start, len) },
        }
    }
}

/// A buffer of the buffer protocol, until it is dropped.
struct Buffer(Box<ffi::Py_buffer>);

impl Buffer {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        let mut raw = Box::new(ffi::Py_buffer::new());
        // SAFETY: an object, and a structure to fill that does not move.
        match unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *raw, ffi::PyBUF_FULL_RO) } {
            0 => Ok(Buffer(raw)),
            _ => Err(PyErr::fetch(object.py())),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Not when the interpreter is gone: its objects are, too.
        // SAFETY: filled by Python, and given back once.
        Python::try_attach(|_| unsafe { ffi::PyBuffer_Release(&mut *self.0) });
    }
}

fn objects() -> PyErr {
    PyTypeError::new_err(
        "an array of Python objects has no bytes of its own; convert it to a type with a size",
    )
}

/// How long an element is that `__array_interface__` describes so, and what it is if that has a name here.
fn type_of_typestr(typestr: &str) -> PyResult<(usize, Option<Dtype>)> {
    let wrong = || errors::argument(format!("__array_interface__ with the type {typestr:?}"));
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
    // Those that are so many bytes say nothing.
    Ok((bytes, dtype.filter(|_| native && *kind != b'V')))
}

/// Strides, in units of `item_bytes` bytes, of elements that follow each other row by row.
pub(crate) fn row_strides(shape: &[usize], item_bytes: usize) -> Vec<isize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = item_bytes as isize;
    for (at, &len) in shape.iter().enumerate().rev() {
        strides[at] = stride;
        stride = stride.wrapping_mul(len as isize);
    }
    strides
}

/// What the buffer protocol calls a type.
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

/// As the buffer protocol calls a type; `None` for those it has no word for.
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

/// As `__array_interface__` calls a type: those that numpy does not know are so many bytes.
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
