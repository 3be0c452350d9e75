//! [`Cohorts`]: labels of objects that are leased and evicted together, best effort.
//!
//! A lease on a member is a lease on all members and is stored once, here. When a member is evicted, the others follow
//! unless they are leased. Members are identified by object id, because record numbers change.

use moontide_types::ObjectId;

use crate::ids::TenantIndex;
use crate::time::Tick;

/// A label and its members.
#[derive(Debug)]
pub(crate) struct Cohort {
    tenant: TenantIndex,
    label: Box<[u8]>,
    /// End of the longest lease on any member.
    pub(crate) until: Tick,
    members: hashbrown::HashSet<ObjectId>,
}

impl Cohort {
    pub(crate) fn members(&self) -> impl Iterator<Item = ObjectId> {
        self.members.iter().copied()
    }

    pub(crate) fn label(&self) -> &[u8] {
        &self.label
    }
}

/// All cohorts of a group. A cohort without members is removed.
#[derive(Debug, Default)]
pub(crate) struct Cohorts {
    by_label: hashbrown::HashMap<(TenantIndex, Box<[u8]>), u32>,
    all: Vec<Option<Cohort>>,
    vacant: Vec<u32>,
}

impl Cohorts {
    /// Adds a member. Returns the cohort's number.
    pub(crate) fn join(&mut self, tenant: TenantIndex, label: &[u8], id: ObjectId) -> u32 {
        let number = match self.by_label.get(&(tenant, Box::from(label))) {
            Some(&number) => number,
            None => {
                let cohort =
                    Cohort { tenant, label: label.into(), until: Tick(0), members: Default::default() };
                let number = match self.vacant.pop() {
                    Some(number) => number,
                    None => {
                        self.all.push(None);
                        (self.all.len() - 1) as u32
                    }
                };
                self.all[number as usize] = Some(cohort);
                self.by_label.insert((tenant, label.into()), number);
                number
            }
        };
        self.get_mut(number).members.insert(id);
        number
    }

    /// Removes a member.
    pub(crate) fn leave(&mut self, number: u32, id: ObjectId) {
        let cohort = self.get_mut(number);
        cohort.members.remove(&id);
        if cohort.members.is_empty() {
            let Cohort { tenant, label, .. } =
                self.all[number as usize].take().expect("cohort existed above");
            self.by_label.remove(&(tenant, label));
            self.vacant.push(number);
        }
    }

    pub(crate) fn get(&self, number: u32) -> &Cohort {
        self.all[number as usize].as_ref().expect("cohort with members exists")
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> &mut Cohort {
        self.all[number as usize].as_mut().expect("cohort with members exists")
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn len(&self) -> usize {
        self.by_label.len()
    }
}
