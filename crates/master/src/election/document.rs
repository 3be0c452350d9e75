//! [`Document`]: what masters agree on. [`Identity`]: what never changes.
//!
//! Both are stored as JSON, so that an operator can read them. The identity is stored apart, because it is a secret.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU16;

use moontide_types::{GroupId, Term};
use serde::{Deserialize, Serialize};

/// Layout of the document. A release that changes it reads the older one.
const FORMAT: u32 = 1;

/// Masters that are leaving, or have left; more do not leave at a time.
const RETIRING_MAX: usize = 64;

/// Who a cluster is.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its number.
    pub cluster: u64,
    /// Number of the id key.
    pub id_key: u32,
    /// The key's secret.
    pub secret: [u8; 32],
    /// Its groups.
    pub groups: NonZeroU16,
}

impl fmt::Debug for Identity {
    /// Without the secret: it must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity { cluster, id_key, groups, secret: _ } = self;
        f.debug_struct("Identity")
            .field("cluster", cluster)
            .field("id_key", id_key)
            .field("groups", groups)
            .finish_non_exhaustive()
    }
}

/// Where a master is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterAddresses {
    /// gRPC.
    pub grpc: String,
    /// The framed protocol.
    pub frame: String,
}

/// Who has a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The number of the master.
    pub master: u32,
    /// The group's term.
    pub term: u32,
    /// Its term before; 0 if nobody had it.
    pub previous: u32,
}

/// A group that somebody has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hosting {
    /// The group.
    pub group: GroupId,
    /// Its term.
    pub term: Term,
    /// Its term before; zero if nobody had it.
    pub previous: Term,
    /// Whether this master has seen the one of that term at work. If not, nobody knows for how long there was none.
    pub witnessed: bool,
}

/// A tenant, as all masters know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantEntry {
    /// How often everything of it was removed.
    pub generation: u32,
    /// Most bytes; 0 for no limit.
    pub bytes_max: u64,
    /// Most objects; 0 for no limit.
    pub objects_max: u64,
}

/// What somebody wants to change about a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantChange {
    /// Everything of it is removed.
    NextGeneration,
    /// As before, but of this generation at least.
    AtLeast {
        /// The generation.
        generation: u32,
    },
    /// Its quota.
    Quota {
        /// Most bytes.
        bytes_max: u64,
        /// Most objects.
        objects_max: u64,
    },
}

impl TenantChange {
    /// The tenant after it.
    pub fn of(self, before: TenantEntry) -> TenantEntry {
        match self {
            TenantChange::NextGeneration => {
                TenantEntry { generation: before.generation.saturating_add(1), ..before }
            }
            TenantChange::AtLeast { generation } => {
                TenantEntry { generation: before.generation.max(generation), ..before }
            }
            TenantChange::Quota { bytes_max, objects_max } => {
                TenantEntry { bytes_max, objects_max, ..before }
            }
        }
    }
}

/// What masters agree on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    format: u32,
    /// Rises with every change.
    pub version: u64,
    /// The last term that was given out.
    pub last_term: u32,
    /// Of each group; none before anybody took it.
    pub owners: Vec<Option<Owner>>,
    /// Where the owners are reached, by their numbers.
    pub masters: BTreeMap<u32, MasterAddresses>,
    /// Tenants of which something must be remembered.
    pub tenants: BTreeMap<String, TenantEntry>,
    /// Masters that are about to leave: they are given nothing any more.
    #[serde(default)]
    pub retiring: BTreeSet<u32>,
}

impl Document {
    /// Of a cluster that begins.
    pub fn new(groups: NonZeroU16) -> Document {
        Document {
            format: FORMAT,
            version: 1,
            last_term: 0,
            owners: vec![None; groups.get().into()],
            masters: BTreeMap::new(),
            tenants: BTreeMap::new(),
            retiring: BTreeSet::new(),
        }
    }

    /// Reads one. The error says what is wrong with it.
    pub fn decode(json: &[u8]) -> Result<Document, String> {
        let document: Document = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        if document.format != FORMAT {
            return Err(format!("its format is {}, this release reads {FORMAT}", document.format));
        }
        let named = |owner: &Owner| document.masters.contains_key(&owner.master);
        if !document.owners.iter().flatten().all(named) {
            return Err("an owner of a group has no address".into());
        }
        let known = |owner: &Owner| {
            let highest = owner.term.max(owner.master).max(owner.previous);
            highest <= document.last_term
        };
        if document.last_term > Term::MAX.get() || !document.owners.iter().flatten().all(known) {
            return Err("it names terms that were not given out".into());
        }
        Ok(document)
    }

    /// Writes one.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers, strings and maps of them are JSON")
    }

    /// The next version, with one more term; none when terms are used up.
    pub fn with_next_term(&self) -> Option<(Document, Term)> {
        let term = Term::new(self.last_term + 1).ok()?;
        let next = Document { version: self.version + 1, last_term: term.get(), ..self.clone() };
        Some((next, term))
    }

    /// The next version, in which these groups have this owner, with a term of their own.
    pub fn with_owner(
        &self,
        groups: &[GroupId],
        master: Term,
        addresses: &MasterAddresses,
    ) -> Option<(Document, Term)> {
        let (mut next, mut term) = self.with_next_term()?;
        if moontide_types::planted("term-used-again") {
            (next.last_term, term) = (self.last_term, Term::new(self.last_term).ok()?);
        }
        for group in groups {
            let owner = &mut next.owners[usize::from(group.0)];
            let previous = owner.map_or(0, |owner| owner.term);
            *owner = Some(Owner { master: master.get(), term: term.get(), previous });
        }
        next.masters.insert(master.get(), addresses.clone());
        next.masters.retain(|number, _| next.owners.iter().flatten().any(|owner| owner.master == *number));
        Some((next, term))
    }

    /// The next version, in which a master is about to leave.
    pub fn with_retiring(&self, master: Term) -> Document {
        let mut next = Document { version: self.version + 1, ..self.clone() };
        next.retiring.insert(master.get());
        // Numbers are never used again: of those who left long ago nothing need be known.
        while next.retiring.len() > RETIRING_MAX {
            next.retiring.pop_first();
        }
        next
    }

    /// The next version, in which a tenant is this.
    pub fn with_tenant(&self, name: &str, entry: TenantEntry) -> Document {
        let mut next = Document { version: self.version + 1, ..self.clone() };
        next.tenants.insert(name.to_owned(), entry);
        next
    }

    /// The same, as if all terms up to this one had been given out.
    pub fn with_terms_above(&self, seen: Term) -> Document {
        Document { last_term: self.last_term.max(seen.get()), ..self.clone() }
    }

    /// The groups whose masters are such, and their terms.
    pub fn hosted_by(&self, is_such: impl Fn(u32) -> bool) -> impl Iterator<Item = (GroupId, Term)> {
        let owners = (0u16..).zip(&self.owners);
        owners.filter_map(move |(group, owner)| {
            let owner = owner.filter(|owner| is_such(owner.master))?;
            Some((GroupId(group), Term::new(owner.term).expect("checked when it was read")))
        })
    }

    /// The groups of a master.
    pub fn groups_of(&self, master: Term) -> impl Iterator<Item = Hosting> {
        let owners = (0u16..).zip(&self.owners);
        owners.filter_map(move |(group, owner)| {
            let owner = owner.filter(|owner| owner.master == master.get())?;
            let term = |number| Term::new(number).expect("checked when it was read");
            let (term, previous) = (term(owner.term), term(owner.previous));
            Some(Hosting { group: GroupId(group), term, previous, witnessed: false })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: NonZeroU16 = NonZeroU16::new(3).unwrap();

    #[test]
    fn it_is_read_as_it_was_written_and_nonsense_is_refused() {
        let addresses = MasterAddresses { grpc: "a:1".into(), frame: "a:2".into() };
        let (document, first) = Document::new(GROUPS).with_next_term().unwrap();
        let (mut document, second) =
            document.with_owner(&[GroupId(0), GroupId(2)], first, &addresses).unwrap();
        document.tenants.insert("t".into(), TenantEntry { generation: 3, ..Default::default() });
        assert_eq!((first.get(), second.get(), document.version), (1, 2, 3));
        let hosting =
            |group| Hosting { group: GroupId(group), term: second, previous: Term::ZERO, witnessed: false };
        assert_eq!(document.groups_of(first).collect::<Vec<_>>(), [hosting(0), hosting(2)]);
        assert_eq!(Document::decode(&document.encode()), Ok(document.clone()));
        for change in [
            |d: &mut Document| d.format = 9,
            |d: &mut Document| d.masters.clear(),
            |d: &mut Document| d.last_term = 1,
            |d: &mut Document| d.last_term = u32::MAX,
        ] {
            let mut wrong = document.clone();
            change(&mut wrong);
            assert!(Document::decode(&wrong.encode()).is_err(), "{wrong:?}");
        }
        assert!(Document::decode(b"{}").is_err());
    }

    #[test]
    fn addresses_of_those_who_own_nothing_are_forgotten_and_secrets_are_not_shown() {
        let at = |name: &str| MasterAddresses { grpc: name.into(), frame: String::new() };
        let (document, one) = Document::new(GROUPS).with_next_term().unwrap();
        let (document, two) = document.with_next_term().unwrap();
        let all = [GroupId(0), GroupId(1), GroupId(2)];
        let (document, _) = document.with_owner(&all, one, &at("one")).unwrap();
        let (document, _) = document.with_owner(&all[..2], two, &at("two")).unwrap();
        assert_eq!(document.masters.len(), 2);
        assert!(document.groups_of(one).all(|hosting| hosting.previous == Term::ZERO));
        assert!(
            document.groups_of(two).all(|hosting| hosting.previous > Term::ZERO),
            "somebody had them before"
        );
        let (document, _) = document.with_owner(&all[2..], two, &at("two")).unwrap();
        assert_eq!(document.masters.keys().copied().collect::<Vec<_>>(), [two.get()]);
        let identity = Identity { cluster: 1, id_key: 2, secret: [77; 32], groups: GROUPS };
        assert!(!format!("{identity:?}").contains("77"));
    }
}
