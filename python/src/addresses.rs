//! Calls with pointers, for callers who have nothing else: what `moontide.compat` is made of.
//!
//! They answer with numbers instead of exceptions: 0 or a length if all is well, otherwise the error's code with a minus.

use moontide_client::{PutItem, StoreError};
use moontide_types::ErrorCode;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use crate::arguments::{Keys, PutOptions, put_options, same_length};
use crate::errors;
use crate::store::{Store, copy_out, get_batch_into_parts};

/// Memory of one object: where its parts are and how long.
struct Parts(Vec<(usize, usize)>);

impl Parts {
    /// One address and one size, or a list of each.
    fn of(addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Parts> {
        // One that stands for a number: an int, or one of numpy's.
        let is_list = addresses.is_instance_of::<PyList>() || addresses.is_instance_of::<PyTuple>();
        if addresses.is_instance_of::<PyInt>() || !is_list && addresses.extract::<usize>().is_ok() {
            return Ok(Parts(vec![part(addresses, sizes)?]));
        }
        if addresses.len()? != sizes.len()? {
            return Err(errors::argument("as many sizes as addresses are expected for each key"));
        }
        let (addresses, sizes) = (addresses.try_iter()?, sizes.try_iter()?);
        let pairs: Vec<_> =
            addresses.zip(sizes).map(|(address, size)| part(&address?, &size?)).collect::<PyResult<_>>()?;
        Ok(Parts(pairs))
    }

    fn len(&self) -> usize {
        self.0.iter().map(|&(_, size)| size).sum()
    }

    /// # Safety
    /// Whoever passed the addresses vouches for the memory, as in C.
    unsafe fn sources<'a>(&self) -> Vec<&'a [u8]> {
        let used = self.0.iter().filter(|&&(_, size)| size > 0);
        // SAFETY: not null, and the caller's word for the rest.
        used.map(|&(address, size)| unsafe { std::slice::from_raw_parts(address as *const u8, size) })
            .collect()
    }

    /// # Safety
    /// As [`Parts::sources`]; and nobody else uses the memory meanwhile.
    unsafe fn targets<'a>(&self) -> Vec<&'a mut [u8]> {
        let used = self.0.iter().filter(|&&(_, size)| size > 0);
        // SAFETY: not null, and the caller's word for the rest.
        used.map(|&(address, size)| unsafe { std::slice::from_raw_parts_mut(address as *mut u8, size) })
            .collect()
    }
}

fn part(address: &Bound<'_, PyAny>, size: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let (address, size): (usize, usize) = (address.extract()?, size.extract()?);
    let end = address.checked_add(size).filter(|&end| end <= isize::MAX as usize);
    if size > 0 && (address == 0 || end.is_none()) {
        return Err(errors::argument(format!("{size} bytes at {address:#x} are no memory")));
    }
    Ok((address, size))
}

fn all_parts(keys: usize, addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Vec<Parts>> {
    let (count, sizes_count) = (addresses.len()?, sizes.len()?);
    same_length(keys, count, "addresses")?;
    same_length(keys, sizes_count, "sizes")?;
    let pairs = addresses.try_iter()?.zip(sizes.try_iter()?);
    pairs.map(|(addresses, sizes)| Parts::of(&addresses?, &sizes?)).collect()
}

fn number(error: &StoreError) -> i64 {
    -(error.code() as i64)
}

/// Puts objects from addresses; 0 for each that is stored or was there, otherwise minus the error's code.
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
    // SAFETY: what the addresses name is there, says the caller.
    let parts: Vec<Vec<&[u8]>> = all.iter().map(|parts| unsafe { parts.sources() }).collect();
    let items: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
    let client = store.client(py)?;
    let outcomes = py.detach(|| client.put_batch(&items, &options));
    Ok(outcomes.iter().map(|outcome| outcome.as_ref().err().map_or(0, number)).collect())
}

/// Gets objects to addresses; the length of each, otherwise minus the error's code. With `exact`, one that does not
/// fill its memory is as bad as one that does not fit.
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
    // SAFETY: what the addresses name is there and nobody else uses it now, says the caller.
    let mut spaces: Vec<Vec<&mut [u8]>> = all.iter().map(|parts| unsafe { parts.targets() }).collect();
    let client = store.client(py)?;
    // One that is here, without a batch around it.
    if let ([key], [spaces]) = (&keys[..], &mut spaces[..])
        && let [space] = &mut spaces[..]
        && let Ok(Some(object)) = client.get_ref_here(key)
    {
        let len = object.len();
        if len > space.len() {
            return Ok(vec![-(ErrorCode::InvalidArgument as i64)]);
        }
        if exact && len < space.len() {
            return Ok(vec![-(ErrorCode::OutOfBounds as i64)]);
        }
        // Otherwise it is not right here, and may be elsewhere.
        if copy_out(py, &client, &object, &mut space[..len]) {
            return Ok(vec![len as i64]);
        }
    }
    let outcomes = py.detach(|| get_batch_into_parts(&client, &keys, &mut spaces));
    let each = outcomes.iter().zip(&all).map(|(outcome, parts)| match outcome {
        Ok(Some(len)) if exact && *len != parts.len() => -(ErrorCode::OutOfBounds as i64),
        Ok(Some(len)) => *len as i64,
        Ok(None) => -(ErrorCode::NotFound as i64),
        Err(error) => number(error),
    });
    Ok(each.collect())
}

/// 1 for each object that is there, 0 for each that is not; minus the error's code for all if the call failed.
pub(crate) fn exist(store: &Store, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let keys = Keys::of(keys)?;
    let keys = keys.bytes()?;
    let client = store.client(py)?;
    let found = py.detach(|| match keys[..] {
        [key] => client.exists(key).map(|found| vec![found]),
        _ => client.exists_batch(&keys),
    });
    Ok(match found {
        Ok(found) => found.into_iter().map(i64::from).collect(),
        Err(error) => vec![number(&error); keys.len()],
    })
}
