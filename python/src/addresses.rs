//! Calls with raw addresses, used by `moontide.compat` and `moontide.kv`.
//!
//! They return codes instead of raising exceptions: 0 or a length on success, otherwise the negative error code.

use moontide_client::{PutItem, StoreError};
use moontide_types::ErrorCode;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use crate::arguments::{Keys, PutOptions, put_options, same_length};
use crate::errors;
use crate::store::{Store, copy_out, get_batch_into_parts};

/// Memory of one object: address and length of each part.
struct ObjectParts(Vec<(usize, usize)>);

impl ObjectParts {
    /// Parses one address and one size, or a list of each.
    fn of(addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<ObjectParts> {
        // A single number: an int, or a numpy integer.
        let is_list = addresses.is_instance_of::<PyList>() || addresses.is_instance_of::<PyTuple>();
        if addresses.is_instance_of::<PyInt>() || !is_list && addresses.extract::<usize>().is_ok() {
            return Ok(ObjectParts(vec![part(addresses, sizes)?]));
        }
        if addresses.len()? != sizes.len()? {
            return Err(errors::argument("each key needs as many sizes as addresses"));
        }
        let (addresses, sizes) = (addresses.try_iter()?, sizes.try_iter()?);
        let pairs: Vec<_> =
            addresses.zip(sizes).map(|(address, size)| part(&address?, &size?)).collect::<PyResult<_>>()?;
        Ok(ObjectParts(pairs))
    }

    fn len(&self) -> usize {
        self.0.iter().map(|&(_, size)| size).sum()
    }

    /// # Safety
    /// The memory at the addresses is valid for `'a`. The Python caller that passed them guarantees it, as in C.
    unsafe fn sources<'a>(&self) -> Vec<&'a [u8]> {
        let used = self.0.iter().filter(|&&(_, size)| size > 0);
        // SAFETY: the address is not null; the caller guarantees the rest.
        used.map(|&(address, size)| unsafe { std::slice::from_raw_parts(address as *const u8, size) })
            .collect()
    }

    /// # Safety
    /// As [`ObjectParts::sources`]; and no other code uses the memory meanwhile.
    unsafe fn targets<'a>(&self) -> Vec<&'a mut [u8]> {
        let used = self.0.iter().filter(|&&(_, size)| size > 0);
        // SAFETY: the address is not null; the caller guarantees the rest.
        used.map(|&(address, size)| unsafe { std::slice::from_raw_parts_mut(address as *mut u8, size) })
            .collect()
    }
}

fn part(address: &Bound<'_, PyAny>, size: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let (address, size): (usize, usize) = (address.extract()?, size.extract()?);
    let end = address.checked_add(size).filter(|&end| end <= isize::MAX as usize);
    if size > 0 && (address == 0 || end.is_none()) {
        return Err(errors::argument(format!("{size} bytes at {address:#x} are not a valid address range")));
    }
    Ok((address, size))
}

fn all_parts(
    keys: usize,
    addresses: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
) -> PyResult<Vec<ObjectParts>> {
    let (count, sizes_count) = (addresses.len()?, sizes.len()?);
    same_length(keys, count, "addresses")?;
    same_length(keys, sizes_count, "sizes")?;
    let pairs = addresses.try_iter()?.zip(sizes.try_iter()?);
    pairs.map(|(addresses, sizes)| ObjectParts::of(&addresses?, &sizes?)).collect()
}

fn negative_code(error: &StoreError) -> i64 {
    -(error.code() as i64)
}

/// Puts objects from addresses. Returns 0 for each object that was stored or exists, otherwise the negative error code.
pub(crate) fn put(
    store: &Store,
    py: Python<'_>,
    keys: &Bound<'_, PyAny>,
    addresses: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
    options: Option<&Bound<'_, PutOptions>>,
) -> PyResult<Vec<i64>> {
    let options = put_options(py, options, None)?;
    let keys = Keys::of(keys)?;
    let all = all_parts(keys.len(), addresses, sizes)?;
    let keys = keys.bytes()?;
    // SAFETY: the caller guarantees that the memory at the addresses is valid.
    let parts: Vec<Vec<&[u8]>> = all.iter().map(|parts| unsafe { parts.sources() }).collect();
    let items: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
    let client = store.client(py)?;
    let outcomes = py.detach(|| client.put_batch(&items, &options));
    Ok(outcomes.iter().map(|outcome| outcome.as_ref().err().map_or(0, negative_code)).collect())
}

/// Gets objects to addresses. Returns the length of each object, otherwise the negative error code. With `exact`, an
/// object that is shorter than its memory is an error, as one that does not fit.
pub(crate) fn get(
    store: &Store,
    py: Python<'_>,
    keys: &Bound<'_, PyAny>,
    addresses: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
    exact: bool,
) -> PyResult<Vec<i64>> {
    let keys = Keys::of(keys)?;
    let all = all_parts(keys.len(), addresses, sizes)?;
    let keys = keys.bytes()?;
    // SAFETY: the caller guarantees that the memory at the addresses is valid and that no other code uses it now.
    let mut spaces: Vec<Vec<&mut [u8]>> = all.iter().map(|parts| unsafe { parts.targets() }).collect();
    let client = store.client(py)?;
    // Fast path for one local object.
    if let ([key], [spaces]) = (&keys[..], &mut spaces[..])
        && let [space] = &mut spaces[..]
        && let Ok(Some(object)) = client.try_get_ref(key)
    {
        let len = object.len();
        if len > space.len() {
            return Ok(vec![-(ErrorCode::InvalidArgument as i64)]);
        }
        if exact && len < space.len() {
            return Ok(vec![-(ErrorCode::OutOfBounds as i64)]);
        }
        // If the local copy is corrupt, another replica may be intact.
        if copy_out(py, &client, &object, &mut space[..len]) {
            return Ok(vec![len as i64]);
        }
    }
    let outcomes = py.detach(|| get_batch_into_parts(&client, &keys, &mut spaces));
    let each = outcomes.iter().zip(&all).map(|(outcome, parts)| match outcome {
        Ok(Some(len)) if exact && *len != parts.len() => -(ErrorCode::OutOfBounds as i64),
        Ok(Some(len)) => *len as i64,
        Ok(None) => -(ErrorCode::NotFound as i64),
        Err(error) => negative_code(error),
    });
    Ok(each.collect())
}

/// Returns 1 for each key that exists, 0 for each that does not, and the negative error code for each that failed.
pub(crate) fn exist(store: &Store, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let keys = Keys::of(keys)?;
    let keys = keys.bytes()?;
    let client = store.client(py)?;
    let found = py.detach(|| match keys[..] {
        [key] => vec![client.exists(key)],
        _ => client.exists_batch(&keys),
    });
    Ok(found.iter().map(|found| found.as_ref().map_or_else(negative_code, |&found| found.into())).collect())
}
