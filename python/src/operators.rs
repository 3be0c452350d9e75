//! Results of the calls of operators, and of metadata, as dicts.

use moontide_client::{ObjectInfo, SegmentInfo, TenantInfo};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;
use crate::store::node_name;

/// Returns the metadata of an object.
pub(crate) fn object_dict<'py>(py: Python<'py>, info: &ObjectInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("size", info.len)?;
    dict.set_item("pin", format!("{:?}", info.pin).to_lowercase())?;
    dict.set_item("version", info.epoch.bits())?;
    dict.set_item("writing", info.writing)?;
    let expires = (info.expires_unix_ms > 0).then(|| info.expires_unix_ms as f64 / 1e3);
    dict.set_item("expires", expires)?;
    let replicas = info.stripes.iter().map(|stripe| {
        let location = PyDict::new(py);
        location.set_item("node", node_name(stripe.node))?;
        location.set_item("medium", stripe.medium.name())?;
        location.set_item("replica", stripe.replica)?;
        location.set_item("offset", stripe.offset)?;
        location.set_item("size", stripe.len)?;
        Ok(location)
    });
    dict.set_item("locations", replicas.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

/// Returns quota and usage of a tenant.
pub(crate) fn tenant_dict<'py>(py: Python<'py>, tenant: &TenantInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("tenant", &tenant.name)?;
    dict.set_item("bytes", tenant.bytes)?;
    dict.set_item("objects", tenant.objects)?;
    dict.set_item("bytes_max", tenant.bytes_max)?;
    dict.set_item("objects_max", tenant.objects_max)?;
    dict.set_item("generation", tenant.generation)?;
    Ok(dict)
}

/// Returns the state of a segment.
pub(crate) fn segment_dict<'py>(py: Python<'py>, segment: &SegmentInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("node", node_name(segment.node))?;
    dict.set_item("segment", segment.segment.0)?;
    dict.set_item("medium", segment.medium.name())?;
    dict.set_item("group", segment.group)?;
    dict.set_item("state", segment.state.name())?;
    dict.set_item("bytes", segment.bytes)?;
    dict.set_item("live_bytes", segment.live_bytes)?;
    dict.set_item("writing_bytes", segment.writing_bytes)?;
    dict.set_item("draining_bytes", segment.draining_bytes)?;
    dict.set_item("free_bytes", segment.free_bytes)?;
    Ok(dict)
}

/// Converts a share to thousandths, rounded down: at most that share stays.
pub(crate) fn permille(share: f64) -> PyResult<u32> {
    match (0.0..=1.0).contains(&share) {
        true => Ok((share * 1000.0) as u32), // 0 to 1,000
        false => Err(errors::argument("usage must be 0.0 to 1.0")),
    }
}
