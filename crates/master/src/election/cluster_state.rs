//! [`ClusterState`]: owners, terms and tenants, shared by all masters. [`ClusterIdentity`]: the part that never
//! changes.
//!
//! Both are stored as JSON, so that an operator can read them. The identity is stored separately, because it contains a
//! secret.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU16;

use moontide_types::{GroupId, Term};
use serde::{Deserialize, Serialize};

/// Version of the format. A release that changes it must read the older version.
const FORMAT: u32 = 1;

/// Maximum number of remembered retiring masters; more do not shut down at a time.
const RETIRING_MAX: usize = 64;

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

/// Addresses of a master.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterAddresses {
    /// Address of the gRPC server.
    pub grpc: String,
    /// Address of the frame server.
    pub frame: String,
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
        let document: ClusterState = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        if document.format != FORMAT {
            return Err(format!("format {}, this release reads {FORMAT}", document.format));
        }
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

    /// Encodes the state.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers, strings and maps are valid JSON")
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

    /// Returns the next version, with this state of a tenant.
    pub fn with_tenant(&self, name: &str, entry: TenantState) -> ClusterState {
        let mut next = ClusterState { version: self.version + 1, ..self.clone() };
        next.tenants.insert(name.to_owned(), entry);
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
        assert_eq!(ClusterState::decode(&document.encode()), Ok(document.clone()));
        for change in [
            |d: &mut ClusterState| d.format = 9,
            |d: &mut ClusterState| d.masters.clear(),
            |d: &mut ClusterState| d.last_term = 1,
            |d: &mut ClusterState| d.last_term = u32::MAX,
        ] {
            let mut wrong = document.clone();
            change(&mut wrong);
            assert!(ClusterState::decode(&wrong.encode()).is_err(), "{wrong:?}");
        }
        assert!(ClusterState::decode(b"{}").is_err());
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
        assert_eq!(ClusterState::decode(&document.encode()), Ok(document));
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
