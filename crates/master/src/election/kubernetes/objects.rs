//! Objects of the Kubernetes API: [`Lease`], [`Secret`], watch events and errors.
//!
//! Only the used fields. Other fields are skipped when decoding, and left to the API server when writing.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Metadata of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    /// Assigned by the API server; unique even among objects of the same name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) uid: String,
    /// Assigned by the API server; changes with every update. In an update: the version to replace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) resource_version: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lease {
    #[serde(default = "Lease::api_version")]
    pub(super) api_version: String,
    #[serde(default = "Lease::kind")]
    pub(super) kind: String,
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: LeaseSpec,
}

/// Spec of a Lease. Empty in the Lease with the cluster state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LeaseSpec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) holder_identity: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lease_duration_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) acquire_time: Option<String>,
    /// Time by the clock of the holder. Only its changes are relevant; it is not comparable with the own clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) renew_time: Option<String>,
}

impl Lease {
    fn api_version() -> String {
        "coordination.k8s.io/v1".into()
    }

    fn kind() -> String {
        "Lease".into()
    }

    pub(super) fn new(metadata: Metadata, spec: LeaseSpec) -> Lease {
        Lease { api_version: Lease::api_version(), kind: Lease::kind(), metadata, spec }
    }
}

/// List of Leases; its items have no kind.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct LeaseList {
    pub(super) metadata: ListMetadata,
    #[serde(default)]
    pub(super) items: Vec<Lease>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMetadata {
    /// Version from which a watch continues.
    pub(super) resource_version: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Secret {
    #[serde(default)]
    pub(super) api_version: String,
    #[serde(default)]
    pub(super) kind: String,
    pub(super) metadata: Metadata,
    /// Values in base64.
    #[serde(default)]
    pub(super) data: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) immutable: bool,
}

/// Error object (`Status`) of the API server.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct ApiStatus {
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) code: u16,
}

/// One line of a watch.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct WatchLine {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) object: serde_json::Value,
}

/// Event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The object was created or updated; its new state.
    Updated(Box<Lease>),
    /// The object was deleted; its last state.
    Deleted(Box<Lease>),
    /// No change; only the version advanced.
    Bookmark,
    /// The watch has ended: its start version is too old (410), or another error occurred.
    Closed { code: u16, message: String },
}

impl Event {
    pub(super) fn decode(line: &[u8]) -> Result<Event, serde_json::Error> {
        let WatchLine { kind, object } = serde_json::from_slice(line)?;
        Ok(match kind.as_str() {
            "ADDED" | "MODIFIED" => Event::Updated(serde_json::from_value(object)?),
            "DELETED" => Event::Deleted(serde_json::from_value(object)?),
            "BOOKMARK" => Event::Bookmark,
            _ => {
                let ApiStatus { message, code } = serde_json::from_value(object).unwrap_or_default();
                Event::Closed { code, message }
            }
        })
    }
}

/// Options of a deletion, with preconditions.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeleteOptions<'a> {
    pub(super) api_version: &'static str,
    pub(super) kind: &'static str,
    pub(super) preconditions: Preconditions<'a>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Preconditions<'a> {
    pub(super) uid: &'a str,
    pub(super) resource_version: &'a str,
}

impl DeleteOptions<'_> {
    /// Requires exactly this version of this object.
    pub(super) fn exactly(metadata: &Metadata) -> DeleteOptions<'_> {
        DeleteOptions {
            api_version: "v1",
            kind: "DeleteOptions",
            preconditions: Preconditions { uid: &metadata.uid, resource_version: &metadata.resource_version },
        }
    }
}

/// Formats a time as in Leases: RFC 3339 with six fractional digits.
pub(super) fn micro_time(now: SystemTime) -> String {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Returns the date `days` days after 1970-01-01. Internally a year starts in March, so that the leap day is its last
/// day; 400 years have 146,097 days.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // counted from 0000-03-01
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153; // 0 is March
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year_of_era + next_year, month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn micro_time_formats_as_rfc3339() {
        for (seconds, micros, text) in [
            (0, 0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, 999_999, "2000-02-28T23:59:59.999999Z"),
            (951_782_400, 0, "2000-02-29T00:00:00.000000Z"),
            (1_709_251_199, 1, "2024-02-29T23:59:59.000001Z"),
            (1_735_689_599, 0, "2024-12-31T23:59:59.000000Z"),
            (1_767_225_600, 20, "2026-01-01T00:00:00.000020Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000000Z"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros);
            assert_eq!(micro_time(time), text);
        }
    }

    // The JSON below follows the Kubernetes API reference: "Lease" (coordination.k8s.io/v1), "Status" and "Efficient
    // detection of changes" at https://kubernetes.io/docs/reference/.

    #[test]
    fn lease_json_matches_kubernetes_api() {
        let text = r#"{
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": "apiserver-07a5ea9b9b072c4a5f3d1c3702",
                "namespace": "kube-system",
                "uid": "21ebb7f6-8c2c-4e8a-9f0c-1c9d4c1e7d0a",
                "resourceVersion": "334899",
                "creationTimestamp": "2023-07-02T21:16:48Z",
                "labels": {"apiserver.kubernetes.io/identity": "kube-apiserver"},
                "managedFields": [{"manager": "x", "operation": "Update"}]
            },
            "spec": {
                "holderIdentity": "apiserver-07a5ea9b9b072c4a5f3d1c3702_0c8914f7-0f35-440e-8676-7844977d3a05",
                "leaseDurationSeconds": 3600,
                "renewTime": "2023-07-04T21:58:48.065888Z"
            }
        }"#;
        let lease: Lease = serde_json::from_str(text).unwrap();
        assert_eq!(lease.metadata.resource_version, "334899");
        assert_eq!(lease.spec.lease_duration_seconds, Some(3600));
        assert_eq!(lease.spec.renew_time.as_deref(), Some("2023-07-04T21:58:48.065888Z"));
        let spec = LeaseSpec {
            holder_identity: Some("7".into()),
            lease_duration_seconds: Some(5),
            acquire_time: None,
            renew_time: Some("2026-01-01T00:00:00.000020Z".into()),
        };
        let metadata = Metadata { name: "moontide-master-7".into(), ..Metadata::default() };
        assert_eq!(
            serde_json::to_value(Lease::new(metadata, spec)).unwrap(),
            serde_json::json!({
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": "moontide-master-7"},
                "spec": {
                    "holderIdentity": "7",
                    "leaseDurationSeconds": 5,
                    "renewTime": "2026-01-01T00:00:00.000020Z",
                },
            }),
            "unset fields are not written"
        );
    }

    #[test]
    fn lease_list_and_watch_events_are_parsed() {
        let list = r#"{"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1",
            "metadata": {"resourceVersion": "10245"}, "items": [{"metadata": {"name": "a"}, "spec": {}}]}"#;
        let list: LeaseList = serde_json::from_str(list).unwrap();
        assert_eq!((list.metadata.resource_version.as_str(), list.items.len()), ("10245", 1));
        let added = br#"{"type": "ADDED", "object": {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1",
            "metadata": {"resourceVersion": "10596", "name": "a"}, "spec": {}}}"#;
        assert!(
            matches!(Event::decode(added), Ok(Event::Updated(lease)) if lease.metadata.resource_version == "10596")
        );
        let deleted = br#"{"type": "DELETED", "object": {"metadata": {"name": "a"}}}"#;
        assert!(matches!(Event::decode(deleted), Ok(Event::Deleted(_))));
        let bookmark = br#"{"type": "BOOKMARK", "object": {"kind": "Lease",
            "apiVersion": "coordination.k8s.io/v1", "metadata": {"resourceVersion": "12746"}}}"#;
        assert!(matches!(Event::decode(bookmark), Ok(Event::Bookmark)), "a bookmark has no name");
        let gone = br#"{"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Failure", "message": "too old resource version: 1 (10245)", "reason": "Expired", "code": 410}}"#;
        assert!(
            matches!(Event::decode(gone), Ok(Event::Closed { code: 410, message }) if message.contains("too old"))
        );
        assert!(Event::decode(b"{").is_err());
    }

    #[test]
    fn api_status_error_is_parsed() {
        let conflict = r#"{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": "Operation cannot be fulfilled on leases.coordination.k8s.io \"a\": the object has been modified",
            "reason": "Conflict", "details": {"name": "a", "kind": "leases"}, "code": 409}"#;
        let status: ApiStatus = serde_json::from_str(conflict).unwrap();
        assert!(status.code == 409 && status.message.contains("has been modified"));
    }

    #[test]
    fn delete_options_carry_preconditions() {
        let metadata = Metadata {
            uid: "u".into(),
            resource_version: "5".into(),
            name: "a".into(),
            ..Metadata::default()
        };
        assert_eq!(
            serde_json::to_value(DeleteOptions::exactly(&metadata)).unwrap(),
            serde_json::json!({
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "preconditions": {"uid": "u", "resourceVersion": "5"},
            })
        );
    }
}
