//! Responses of the admin endpoints: JSON bodies, and errors with their HTTP status.
//!
//! 64-bit numbers (nodes, epochs, roots, jobs) are strings: many JSON parsers keep only 53 bits.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use moontide_proto::{Handle, Packed, limits, v1};
use moontide_types::{Epoch, ErrorCode, Medium, NodeId};
use serde::Serialize;

use super::text::{hex, show_key};

/// Error of a request.
#[derive(Debug)]
pub(super) struct AdminError {
    pub(super) code: ErrorCode,
    pub(super) message: String,
}

impl AdminError {
    pub(super) fn new(code: ErrorCode, message: impl Into<String>) -> AdminError {
        AdminError { code, message: message.into() }
    }

    pub(super) fn argument(message: impl Into<String>) -> AdminError {
        AdminError::new(ErrorCode::InvalidArgument, message)
    }
}

/// JSON body of an error.
#[derive(Serialize)]
struct AdminErrorBody {
    code: u16,
    name: &'static str,
    message: String,
    hint: &'static str,
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let AdminError { code, message } = self;
        let hint = match code {
            // The hint of the code addresses clients of the cache.
            ErrorCode::NotFound => "see /get_all_keys, /get_all_segments and /get_all_nodes",
            _ => code.hint(),
        };
        let body = AdminErrorBody { code: code as u16, name: code.name(), message, hint };
        (http_status(code), Json(body)).into_response()
    }
}

fn http_status(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::InvalidArgument | ErrorCode::OutOfBounds => StatusCode::BAD_REQUEST,
        ErrorCode::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorCode::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorCode::Unauthenticated => StatusCode::UNAUTHORIZED,
        ErrorCode::PermissionDenied => StatusCode::FORBIDDEN,
        ErrorCode::NotFound | ErrorCode::Gone => StatusCode::NOT_FOUND,
        ErrorCode::AlreadyExists | ErrorCode::InProgress | ErrorCode::Leased => StatusCode::CONFLICT,
        ErrorCode::Busy | ErrorCode::QuotaExceeded | ErrorCode::TooManyTenants => {
            StatusCode::TOO_MANY_REQUESTS
        }
        ErrorCode::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        code if code.is_retryable() => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Fails if the call failed as a whole. `what` is the start of the error message.
pub(super) fn check(context: Option<&v1::ResponseContext>, what: &str) -> Result<(), AdminError> {
    match context {
        Some(v1::ResponseContext { code: 0, .. }) => Ok(()),
        Some(v1::ResponseContext { code, .. }) => {
            let code = ErrorCode::try_from(*code).unwrap_or(ErrorCode::Internal);
            Err(AdminError::new(code, format!("{what}: {}", code.name())))
        }
        None => Err(AdminError::new(ErrorCode::Internal, format!("{what}: response has no context"))),
    }
}

/// JSON form of a segment.
#[derive(Serialize)]
pub(super) struct Segment {
    pub(super) node: String,
    pub(super) segment: u32,
    generation: u64,
    medium: &'static str,
    state: &'static str,
    group: Option<u32>,
    tenant: String,
    units: u32,
    live_units: u32,
    writing_units: u32,
    draining_units: u32,
    free_units: u32,
    slots: u32,
    free_slots: u32,
}

impl Segment {
    pub(super) fn of(detail: &v1::SegmentDetail) -> Segment {
        let spec = detail.spec.clone().unwrap_or_default();
        let status = detail.status.unwrap_or_default();
        Segment {
            node: NodeId(detail.node).to_string(),
            segment: spec.segment,
            generation: spec.generation,
            medium: u8::try_from(spec.medium)
                .ok()
                .and_then(Medium::from_number)
                .map_or("unknown", Medium::name),
            state: match status.state() {
                v1::SegmentState::Unspecified => "unknown",
                v1::SegmentState::Serving => "serving",
                v1::SegmentState::Draining => "draining",
                v1::SegmentState::Reporting => "reporting",
                v1::SegmentState::Failed => "failed",
            },
            group: spec.group,
            tenant: spec.tenant.clone(),
            units: spec.units,
            live_units: status.live_units,
            writing_units: status.writing_units,
            draining_units: status.draining_units,
            free_units: status.free_units,
            slots: spec.slots,
            free_slots: status.free_slots,
        }
    }
}

/// JSON form of an object.
#[derive(Serialize)]
pub(super) struct Object {
    pub(super) key: String,
    id: String,
    epoch: String,
    len: u64,
    root: String,
    writing: bool,
    pin: &'static str,
    leased_ms: u32,
    expires_unix_ms: u64,
    cohort: String,
    pub(super) stripes: Vec<Stripe>,
}

/// JSON form of one stripe of one replica.
#[derive(Serialize)]
pub(super) struct Stripe {
    replica: u8,
    stripe: u16,
    stripes: u16,
    medium: &'static str,
    pub(super) node: String,
    pub(super) segment: u32,
    slot: u32,
    offset: u64,
    len: u64,
}

impl Object {
    pub(super) fn of(detail: &v1::ObjectDetail) -> Object {
        let handles = Packed::<Handle>::decode(&detail.handles, limits::HANDLES_PER_RESPONSE_MAX);
        Object {
            key: show_key(&detail.key),
            id: hex(&detail.id),
            epoch: Epoch::from_bits(detail.epoch)
                .map_or_else(|_| detail.epoch.to_string(), |epoch| epoch.to_string()),
            len: detail.len,
            root: format!("{:016x}", detail.root),
            writing: detail.writing,
            pin: match detail.pin() {
                v1::PinClass::None => "none",
                v1::PinClass::Soft => "soft",
                v1::PinClass::Hard => "hard",
            },
            leased_ms: detail.leased_ms,
            expires_unix_ms: detail.expires_unix_ms,
            cohort: show_key(&detail.cohort),
            stripes: handles
                .map(|handles| handles.iter().map(|handle| Stripe::of(&handle)).collect())
                .unwrap_or_default(),
        }
    }
}

impl Stripe {
    fn of(handle: &Handle) -> Stripe {
        Stripe {
            replica: handle.replica,
            stripe: handle.stripe_index,
            stripes: handle.stripe_count,
            medium: handle.medium.name(),
            node: handle.node.to_string(),
            segment: handle.segment.0,
            slot: handle.slot.0,
            offset: handle.stripe_offset,
            len: handle.stripe_len,
        }
    }
}

/// JSON form of a tenant.
#[derive(Serialize)]
pub(super) struct Tenant {
    name: String,
    generation: u32,
    bytes_max: u64,
    objects_max: u64,
    bytes: u64,
    objects: u64,
}

impl Tenant {
    pub(super) fn of(tenant: &v1::TenantInfo) -> Tenant {
        Tenant {
            name: tenant.name.clone(),
            generation: tenant.generation,
            bytes_max: tenant.bytes_max,
            objects_max: tenant.objects_max,
            bytes: tenant.bytes,
            objects: tenant.objects,
        }
    }
}

/// JSON form of a job.
#[derive(Serialize)]
pub(super) struct Job {
    job: String,
    state: &'static str,
    examined: u64,
    affected: u64,
    skipped: u64,
    total: u64,
    error: Option<&'static str>,
    lost_groups: Vec<u32>,
}

impl Job {
    pub(super) fn of(number: u64, job: &v1::GetJobResponse) -> Job {
        Job {
            job: number.to_string(),
            state: match job.state() {
                v1::JobState::Unspecified => "unknown",
                v1::JobState::Running => "running",
                v1::JobState::Done => "done",
                v1::JobState::Failed => "failed",
            },
            examined: job.examined,
            affected: job.affected,
            skipped: job.skipped,
            total: job.total,
            error: ErrorCode::try_from(job.code).ok().map(ErrorCode::name),
            lost_groups: job.lost_groups.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_code_maps_to_http_error_status() {
        assert_eq!(http_status(ErrorCode::NotFound), StatusCode::NOT_FOUND);
        assert_eq!(http_status(ErrorCode::WrongMaster), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(http_status(ErrorCode::Internal), StatusCode::INTERNAL_SERVER_ERROR);
        for &code in ErrorCode::ALL {
            assert!(http_status(code).is_client_error() || http_status(code).is_server_error(), "{code}");
        }
    }
}
