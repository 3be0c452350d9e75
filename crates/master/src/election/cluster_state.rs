//! [`ClusterState`]: owners, terms and tenants, shared by all masters. [`ClusterIdentity`]: the part that never
//! changes.
//!
//! Both are stored as JSON, so that an operator can read them. The identity is stored separately, because it contains a
//! secret.
//!
//! A registry is shared with other programs, and a process that can write to it is not always a master. So every value is checked
//! when it is read: first its length, which limits the memory of the decoder, then the numbers in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU16;

use moontide_meta::TENANTS_MAX;
use moontide_proto::limits::ADDRESS_BYTES_MAX;
use moontide_types::limits::GROUPS_MAX;
use moontide_types::{GroupId, Tenant, Term};
use serde::{Deserialize, Serialize};

/// Version of the format. A release that changes it must read the older version.
const FORMAT: u32 = 1;

/// Maximum number of remembered retiring masters; more do not shut down at a time.
const RETIRING_MAX: usize = 64;

/// Longest cluster state in bytes: what etcd accepts by default. 4,096 groups and 4,096 tenants take about half of it.
const STATE_BYTES_MAX: usize = 3 << 19;

/// Longest identity, and longest entry of a member, in bytes. Escapes make an address of JSON up to six times as long.
const ENTRY_BYTES_MAX: usize = 1024 + 2 * 6 * ADDRESS_BYTES_MAX;

/// Maximum number of live masters: more than there can be groups would have no work.
pub(super) const MEMBERS_MAX: usize = GROUPS_MAX as usize;

/// Highest version of a state: it counts up, and is never near it.
const VERSION_MAX: u64 = 1 << 62;

/// Highest number of exclusions. Nodes may name up to 2^31, and it counts up from there.
const EXCLUSION_MAX: u32 = 3 << 30;

/// Fails if a stored value is too long.
fn check_length(json: &[u8], max: usize) -> Result<(), String> {
    match json.len() {
        len if len > max => Err(format!("it has {len} bytes, at most {max} are allowed")),
        _ => Ok(()),
    }
}

/// Fails if there are too many of something.
pub(super) fn check_count(what: &str, count: usize, max: usize) -> Result<(), String> {
    if count > max {
        return Err(format!("it has {count} {what}, at most {max} are allowed"));
    }
    Ok(())
}

/// Identity of a cluster.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterIdentity {
    /// Id of the cluster.
    pub cluster: u64,
    /// Number of the id key.
    pub id_key: u32,
    /// Secret of the id key.
    pub secret: [u8; 32],
    /// Number of groups.
    pub groups: NonZeroU16,
}

impl fmt::Debug for ClusterIdentity {
    /// Omits the secret: it must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClusterIdentity { cluster, id_key, groups, secret: _ } = self;
        f.debug_struct("ClusterIdentity")
            .field("cluster", cluster)
            .field("id_key", id_key)
            .field("groups", groups)
            .finish_non_exhaustive()
    }
}

impl ClusterIdentity {
    /// Decodes and checks an identity. The error does not quote it: it contains a secret.
    pub fn decode(json: &[u8]) -> Result<ClusterIdentity, String> {
        check_length(json, ENTRY_BYTES_MAX)?;
        let identity: ClusterIdentity =
            serde_json::from_slice(json).map_err(|_| "it is no valid identity".to_owned())?;
        check_count("groups", identity.groups.get().into(), GROUPS_MAX.into())?;
        Ok(identity)
    }
}

/// Addresses of a master.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterAddresses {
    /// Address of the gRPC server.
    pub grpc: String,
    /// Address of the frame server.
    pub frame: String,
}

impl MasterAddresses {
    /// Decodes and checks the addresses of a member. The error is the reason.
    pub fn decode(json: &[u8]) -> Result<MasterAddresses, String> {
        check_length(json, ENTRY_BYTES_MAX)?;
        let addresses: MasterAddresses = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        addresses.check()?;
        Ok(addresses)
    }

    fn check(&self) -> Result<(), String> {
        let longest = self.grpc.len().max(self.frame.len());
        if longest > ADDRESS_BYTES_MAX {
            return Err(format!("an address has {longest} bytes, at most {ADDRESS_BYTES_MAX} are allowed"));
        }
        Ok(())
    }
}

/// Owner of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupOwner {
    /// Id of the master.
    pub master: u32,
    /// Term of the group.
    pub term: u32,
    /// Previous term of the group; 0 if it had no owner before.
    pub previous: u32,
    /// Number of exclusions of the group ([`Group::excluded`](moontide_meta::Group::excluded)).
    // Most groups have none: the document stays short.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exclusion: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A group with its term, for its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupAssignment {
    /// Id of the group.
    pub group: GroupId,
    /// Term of the group.
    pub term: Term,
    /// Previous term of the group; zero if it had no owner before.
    pub previous: Term,
    /// Number of exclusions of the group.
    pub exclusion: u32,
}

/// State of a tenant, shared by all masters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantState {
    /// Number of times that all its objects were removed.
    pub generation: u32,
    /// Maximum number of bytes; 0 for no limit.
    pub bytes_max: u64,
    /// Maximum number of objects; 0 for no limit.
    pub objects_max: u64,
}

/// Change of a tenant's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantChange {
    /// Removes all objects: increments the generation.
    NextGeneration,
    /// Raises the generation to at least this one.
    AtLeast {
        /// Minimum generation.
        generation: u32,
    },
    /// Sets the quota.
    Quota {
        /// Maximum number of bytes; 0 for no limit.
        bytes_max: u64,
        /// Maximum number of objects; 0 for no limit.
        objects_max: u64,
    },
}

impl TenantChange {
    /// Returns the state after the change.
    pub fn apply(self, before: TenantState) -> TenantState {
        match self {
            TenantChange::NextGeneration => {
                TenantState { generation: before.generation.saturating_add(1), ..before }
            }
            TenantChange::AtLeast { generation } => {
                TenantState { generation: before.generation.max(generation), ..before }
            }
            TenantChange::Quota { bytes_max, objects_max } => {
                TenantState { bytes_max, objects_max, ..before }
            }
        }
    }
}

/// Cluster state: owners and terms of the groups, addresses of masters, tenants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterState {
    format: u32,
    /// Increases with every change.
    pub version: u64,
    /// Last assigned term.
    pub last_term: u32,
    /// Owner of each group; `None` before the first claim.
    pub group_owners: Vec<Option<GroupOwner>>,
    /// Addresses of the owners, by id.
    pub masters: BTreeMap<u32, MasterAddresses>,
    /// Tenants with a quota or a generation above 0.
    pub tenants: BTreeMap<String, TenantState>,
    /// Masters that are shutting down: they get no groups.
    #[serde(default)]
    pub retiring: BTreeSet<u32>,
}

impl ClusterState {
    /// Creates the state of a new cluster.
    pub fn new(groups: NonZeroU16) -> ClusterState {
        ClusterState {
            format: FORMAT,
            version: 1,
            last_term: 0,
            group_owners: vec![None; groups.get().into()],
            masters: BTreeMap::new(),
            tenants: BTreeMap::new(),
            retiring: BTreeSet::new(),
        }
    }

    /// Decodes and checks a state. The error is the reason.
    pub fn decode(json: &[u8]) -> Result<ClusterState, String> {
        check_length(json, STATE_BYTES_MAX)?;
        let document: ClusterState = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        if document.format != FORMAT {
            return Err(format!("format {}, this release reads {FORMAT}", document.format));
        }
        document.check_limits()?;
        let has_address = |owner: &GroupOwner| document.masters.contains_key(&owner.master);
        if !document.group_owners.iter().flatten().all(has_address) {
            return Err("the owner of a group has no address".into());
        }
        let is_assigned = |owner: &GroupOwner| {
            let highest = owner.term.max(owner.master).max(owner.previous);
            highest <= document.last_term
        };
        if document.last_term > Term::MAX.get() || !document.group_owners.iter().flatten().all(is_assigned) {
            return Err("it contains terms that were never assigned".into());
        }
        Ok(document)
    }

    /// Fails if a list is too long, or a field is out of range.
    fn check_limits(&self) -> Result<(), String> {
        if self.group_owners.is_empty() {
            return Err("it has no groups".into());
        }
        if self.version > VERSION_MAX {
            return Err(format!("its version is {}, at most {VERSION_MAX} is allowed", self.version));
        }
        let exclusion = self.group_owners.iter().flatten().map(|owner| owner.exclusion).max().unwrap_or(0);
        if exclusion > EXCLUSION_MAX {
            return Err(format!("a group has {exclusion} exclusions, at most {EXCLUSION_MAX} are allowed"));
        }
        check_count("groups", self.group_owners.len(), GROUPS_MAX.into())?;
        check_count("masters", self.masters.len(), MEMBERS_MAX)?;
        check_count("tenants", self.tenants.len(), TENANTS_MAX)?;
        check_count("retiring masters", self.retiring.len(), RETIRING_MAX)?;
        self.masters.values().try_for_each(MasterAddresses::check)?;
        // The error quotes no name: it may be long.
        let invalid = |error| format!("the name of a tenant is invalid: {error}");
        self.tenants.keys().try_for_each(|name| Tenant::new(name).map(|_| ()).map_err(invalid))
    }

    /// Encodes the state. Fails if no master could read it: the reason names the limit.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        self.check_limits()?;
        let json = serde_json::to_vec(self).expect("numbers, strings and maps are valid JSON");
        check_length(&json, STATE_BYTES_MAX)?;
        Ok(json)
    }

    /// Returns the next version, with one more assigned term; `None` if all terms are used.
    pub fn with_next_term(&self) -> Option<(ClusterState, Term)> {
        let term = Term::new(self.last_term + 1).ok()?;
        let next = ClusterState { version: self.version + 1, last_term: term.get(), ..self.clone() };
        Some((next, term))
    }

    /// Returns the next version, in which `master` owns these groups in a new term.
    pub fn with_owner(
        &self,
        groups: &[GroupId],
        master: Term,
        addresses: &MasterAddresses,
    ) -> Option<(ClusterState, Term)> {
        let (mut next, mut term) = self.with_next_term()?;
        if moontide_rt::mutation_enabled("term-used-again") {
            (next.last_term, term) = (self.last_term, Term::new(self.last_term).ok()?);
        }
        for group in groups {
            let owner = &mut next.group_owners[usize::from(group.0)];
            let (previous, exclusion) = owner.map_or((0, 0), |owner| (owner.term, owner.exclusion));
            let (master, term) = (master.get(), term.get());
            *owner = Some(GroupOwner { master, term, previous, exclusion });
        }
        next.masters.insert(master.get(), addresses.clone());
        next.masters
            .retain(|number, _| next.group_owners.iter().flatten().any(|owner| owner.master == *number));
        Some((next, term))
    }

    /// Returns the next version, in which a master is retiring.
    pub fn with_retiring(&self, master: Term) -> ClusterState {
        let mut next = ClusterState { version: self.version + 1, ..self.clone() };
        next.retiring.insert(master.get());
        // Ids are never reused, so the oldest entries can be dropped.
        while next.retiring.len() > RETIRING_MAX {
            next.retiring.pop_first();
        }
        next
    }

    /// Returns the next version, in which these groups, as far as `master` owns them, have these numbers of exclusions.
    pub fn with_exclusions(&self, groups: &[(GroupId, u32)], master: Term) -> ClusterState {
        let mut next = ClusterState { version: self.version + 1, ..self.clone() };
        for &(group, number) in groups {
            let owner = next.group_owners.get_mut(usize::from(group.0)).and_then(Option::as_mut);
            if let Some(owner) = owner.filter(|owner| owner.master == master.get()) {
                owner.exclusion = owner.exclusion.max(number);
            }
        }
        next
    }

    /// Returns the next version, with this state of a tenant. A tenant without a quota and a generation is forgotten.
    pub fn with_tenant(&self, name: &str, entry: TenantState) -> ClusterState {
        let mut next = ClusterState { version: self.version + 1, ..self.clone() };
        if entry == TenantState::default() {
            next.tenants.remove(name);
        } else {
            next.tenants.insert(name.to_owned(), entry);
        }
        next
    }

    /// Returns the state with all terms up to `seen` marked as assigned.
    pub fn with_terms_above(&self, seen: Term) -> ClusterState {
        ClusterState { last_term: self.last_term.max(seen.get()), ..self.clone() }
    }

    /// Iterates over the groups of a master.
    pub fn groups_of(&self, master: Term) -> impl Iterator<Item = GroupAssignment> {
        let owners = (0u16..).zip(&self.group_owners);
        owners.filter_map(move |(group, owner)| {
            let owner = owner.filter(|owner| owner.master == master.get())?;
            let term = |number| Term::new(number).expect("checked by decode");
            let (term, previous) = (term(owner.term), term(owner.previous));
            Some(GroupAssignment { group: GroupId(group), term, previous, exclusion: owner.exclusion })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: NonZeroU16 = NonZeroU16::new(3).unwrap();

    #[test]
    fn cluster_state_round_trips_and_rejects_invalid() {
        let addresses = MasterAddresses { grpc: "a:1".into(), frame: "a:2".into() };
        let (document, first) = ClusterState::new(GROUPS).with_next_term().unwrap();
        let (mut document, second) =
            document.with_owner(&[GroupId(0), GroupId(2)], first, &addresses).unwrap();
        document.tenants.insert("t".into(), TenantState { generation: 3, ..Default::default() });
        assert_eq!((first.get(), second.get(), document.version), (1, 2, 3));
        let assignment = |group| GroupAssignment {
            group: GroupId(group),
            term: second,
            previous: Term::ZERO,
            exclusion: 0,
        };
        assert_eq!(document.groups_of(first).collect::<Vec<_>>(), [assignment(0), assignment(2)]);
        assert_eq!(ClusterState::decode(&document.encode().unwrap()), Ok(document.clone()));
        for change in [
            |d: &mut ClusterState| d.format = 9,
            |d: &mut ClusterState| d.masters.clear(),
            |d: &mut ClusterState| d.last_term = 1,
            |d: &mut ClusterState| d.last_term = u32::MAX,
        ] {
            let mut wrong = document.clone();
            change(&mut wrong);
            assert!(ClusterState::decode(&wrong.encode().unwrap()).is_err(), "{wrong:?}");
        }
        assert!(ClusterState::decode(b"{}").is_err());
    }

    #[test]
    fn limits_of_cluster_state_hold_for_reading_and_writing() {
        let max = NonZeroU16::new(GROUPS_MAX).unwrap();
        let addresses = |len| MasterAddresses { grpc: "a".repeat(len), frame: "b".repeat(len) };
        let (document, first) = ClusterState::new(max).with_next_term().unwrap();
        let all: Vec<GroupId> = (0..GROUPS_MAX).map(GroupId).collect();
        let (mut largest, _) = document.with_owner(&all, first, &addresses(ADDRESS_BYTES_MAX)).unwrap();
        largest.tenants = (0..TENANTS_MAX)
            .map(|n| (format!("{n:064}"), TenantState { generation: u32::MAX, ..Default::default() }))
            .collect();
        largest.retiring = (0..RETIRING_MAX as u32).collect();
        let json = largest.encode().expect("the largest valid state");
        println!("the largest valid state has {} bytes", json.len());
        assert_eq!(ClusterState::decode(&json), Ok(largest.clone()));

        type Change = fn(&mut ClusterState);
        let changes: [(&str, Change); 9] = [
            ("version", |d| d.version = VERSION_MAX + 1),
            ("exclusions", |d| d.group_owners[7].as_mut().unwrap().exclusion = EXCLUSION_MAX + 1),
            ("groups", |d| d.group_owners.push(None)),
            ("no groups", |d| d.group_owners.clear()),
            ("tenants", |d| d.tenants.extend([("one-more".to_owned(), TenantState::default())])),
            ("tenant", |d| d.tenants = [("bad name".to_owned(), TenantState::default())].into()),
            ("retiring", |d| d.retiring.extend([9_999])),
            ("address", |d| d.masters.values_mut().for_each(|a| a.grpc.push('x'))),
            ("masters", |d| d.masters.extend((0..=MEMBERS_MAX as u32).map(|n| (n, Default::default())))),
        ];
        for (what, change) in changes {
            let mut wrong = largest.clone();
            change(&mut wrong);
            let reason = wrong.encode().expect_err(what);
            assert!(reason.contains(what), "{what}: {reason}");
            let json = serde_json::to_vec(&wrong).unwrap();
            assert_eq!(ClusterState::decode(&json), Err(reason));
        }
        // Nothing is decoded of what is too long.
        let long = vec![b'['; STATE_BYTES_MAX + 1];
        let reason = ClusterState::decode(&long).unwrap_err();
        assert!(reason.contains(&STATE_BYTES_MAX.to_string()), "{reason}");
        let long = vec![b' '; ENTRY_BYTES_MAX + 1];
        assert!(MasterAddresses::decode(&long).unwrap_err().contains("bytes"));
        assert!(ClusterIdentity::decode(&long).unwrap_err().contains("bytes"));
        let member = serde_json::to_vec(&addresses(ADDRESS_BYTES_MAX)).unwrap();
        assert_eq!(MasterAddresses::decode(&member), Ok(addresses(ADDRESS_BYTES_MAX)));
        let member = serde_json::to_vec(&addresses(ADDRESS_BYTES_MAX + 1)).unwrap();
        assert!(MasterAddresses::decode(&member).unwrap_err().contains("address"));
        let groups = NonZeroU16::new(GROUPS_MAX + 1).unwrap();
        let identity = ClusterIdentity { cluster: 1, id_key: 2, secret: [77; 32], groups };
        let reason = ClusterIdentity::decode(&serde_json::to_vec(&identity).unwrap()).unwrap_err();
        assert!(reason.contains("groups") && !reason.contains("77"), "{reason}");
    }

    #[test]
    fn tenant_without_quota_and_generation_is_forgotten() {
        let limited = TenantState { objects_max: 3, ..Default::default() };
        let document = ClusterState::new(GROUPS).with_tenant("t", limited).with_tenant("u", limited);
        let document = document.with_tenant("t", TenantState { generation: 1, ..Default::default() });
        let document = document.with_tenant("u", TenantState::default());
        assert_eq!(document.tenants.keys().collect::<Vec<_>>(), ["t"]);
    }

    #[test]
    fn exclusions_are_counted_by_the_owner_and_outlive_it() {
        let at = |name: &str| MasterAddresses { grpc: name.into(), frame: String::new() };
        let (document, one) = ClusterState::new(GROUPS).with_next_term().unwrap();
        let (document, two) = document.with_next_term().unwrap();
        let (document, _) = document.with_owner(&[GroupId(0), GroupId(1)], one, &at("one")).unwrap();
        let document = document.with_exclusions(&[(GroupId(1), 1), (GroupId(2), 1)], one);
        let document = document.with_exclusions(&[(GroupId(0), 1)], two);
        let (document, _) = document.with_owner(&[GroupId(0), GroupId(1)], two, &at("two")).unwrap();
        let exclusions = |document: &ClusterState| {
            document.groups_of(two).map(|assignment| assignment.exclusion).collect::<Vec<_>>()
        };
        assert_eq!(exclusions(&document), [0, 1]);
        assert_eq!(exclusions(&document.with_exclusions(&[(GroupId(1), 2)], two)), [0, 2]);
        assert_eq!(ClusterState::decode(&document.encode().unwrap()), Ok(document));
    }

    #[test]
    fn cluster_state_drops_masters_without_groups_and_hides_secret() {
        let at = |name: &str| MasterAddresses { grpc: name.into(), frame: String::new() };
        let (document, one) = ClusterState::new(GROUPS).with_next_term().unwrap();
        let (document, two) = document.with_next_term().unwrap();
        let all = [GroupId(0), GroupId(1), GroupId(2)];
        let (document, _) = document.with_owner(&all, one, &at("one")).unwrap();
        let (document, _) = document.with_owner(&all[..2], two, &at("two")).unwrap();
        assert_eq!(document.masters.len(), 2);
        assert!(document.groups_of(one).all(|assignment| assignment.previous == Term::ZERO));
        assert!(
            document.groups_of(two).all(|assignment| assignment.previous > Term::ZERO),
            "they had an owner before"
        );
        let (document, _) = document.with_owner(&all[2..], two, &at("two")).unwrap();
        assert_eq!(document.masters.keys().copied().collect::<Vec<_>>(), [two.get()]);
        let identity = ClusterIdentity { cluster: 1, id_key: 2, secret: [77; 32], groups: GROUPS };
        assert!(!format!("{identity:?}").contains("77"));
    }
}
