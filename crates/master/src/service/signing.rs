//! [`CapabilitySigner`]: signs the capabilities in handles and in the sources of copies.
//!
//! Each node has a key, which changes with the rotation number. A session tells the node the key of the next number; the
//! master signs with it only after the node has acknowledged it, per group: with the mount of a segment of the group, or on
//! the stream of the session. The next key is offered only after that, so that a node never has to know more than two
//! keys of a master, and not before one interval has passed, so that a capability is accepted for at least that long.
//!
//! A group that another master handed off comes with the keys of its nodes. The master signs with them until the nodes mount
//! their segments here, and so have a key of this master.

use std::time::Duration;

use hashbrown::HashMap;
use moontide_meta::NodeKey;
use moontide_proto::convert::NumberedKey;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{
    AccessRight, Capability, CapabilityKey, CapabilityScope, CapabilitySecret, CommandKind, CopySource,
    FixedRecord, Handle, NodeCommand, ObjectEntry, Packed, PackedBuilder, RecordShape, sign_all, v1,
};
use moontide_types::{MonoTime, NodeId, SessionId};
use parking_lot::{RwLock, RwLockReadGuard};

use super::Service;
use super::node_session::NodeSession;

/// Keys of all nodes.
#[derive(Debug)]
pub(super) struct CapabilitySigner {
    secret: CapabilitySecret,
    interval: Duration,
    started: MonoTime,
    /// Keys of the nodes of each group. Locked after the group.
    groups: Vec<RwLock<HashMap<NodeId, SigningKey>>>,
}

/// Key with which a group signs for a node.
#[derive(Clone, Debug)]
struct SigningKey {
    /// Session in which the node has acknowledged the key; `None` for a key from a handoff.
    session: Option<SessionId>,
    rotation: u64,
    key: CapabilityKey,
}

/// Keys of the nodes of one group.
#[derive(Debug)]
pub(super) struct KeysOfGroup<'a>(RwLockReadGuard<'a, HashMap<NodeId, SigningKey>>);

impl KeysOfGroup<'_> {
    /// Returns the key of a node. `None` if the node has not acknowledged one: it would refuse every capability.
    pub(super) fn of(&self, node: NodeId) -> Option<&CapabilityKey> {
        self.0.get(&node).map(|signing| &signing.key)
    }
}

impl CapabilitySigner {
    pub(super) fn new(
        secret: CapabilitySecret,
        interval: Duration,
        groups: u16,
        now: MonoTime,
    ) -> CapabilitySigner {
        let groups = (0..groups).map(|_| RwLock::default()).collect();
        CapabilitySigner { secret, interval, started: now, groups }
    }

    /// Returns the key that a node is to have now.
    pub(super) fn current_key(&self, node: NodeId, now: MonoTime) -> NumberedKey {
        self.numbered(node, self.rotation(now))
    }

    fn rotation(&self, now: MonoTime) -> u64 {
        let intervals = now.since(self.started).as_nanos() / self.interval.as_nanos().max(1);
        1 + u64::try_from(intervals).unwrap_or(u64::MAX - 1)
    }

    fn numbered(&self, node: NodeId, rotation: u64) -> NumberedKey {
        NumberedKey { rotation, key: self.secret.key_of(node, rotation) }
    }

    /// Returns the keys of a group's nodes.
    pub(super) fn keys(&self, group: usize) -> KeysOfGroup<'_> {
        KeysOfGroup(self.groups[group].read())
    }

    /// Records that a node accepts the key of this rotation for a group.
    pub(super) fn mounted(&self, group: usize, node: NodeId, session: SessionId, rotation: u64) {
        let mut keys = self.groups[group].write();
        let known = keys.get(&node).filter(|known| known.session == Some(session));
        if known.is_none_or(|known| known.rotation < rotation) {
            let key = self.secret.key_of(node, rotation);
            keys.insert(node, SigningKey { session: Some(session), rotation, key });
        }
    }

    /// Records that a node accepts the key of this rotation for all groups that it has mounted in this session.
    fn acknowledged(&self, node: NodeId, session: SessionId, rotation: u64) {
        for keys in &self.groups {
            let mut keys = keys.write();
            let known = keys.get_mut(&node).filter(|known| known.session == Some(session));
            if let Some(known) = known.filter(|known| known.rotation < rotation) {
                (known.rotation, known.key) = (rotation, self.secret.key_of(node, rotation));
            }
        }
    }

    /// Forgets the key of a node in a group whose session has ended.
    pub(super) fn ended(&self, group: usize, node: NodeId, session: SessionId) {
        let mut keys = self.groups[group].write();
        if keys.get(&node).is_some_and(|known| known.session == Some(session)) {
            keys.remove(&node);
        }
    }

    /// Forgets the keys of a group that is no longer hosted here.
    pub(super) fn released(&self, group: usize) {
        self.groups[group].write().clear();
    }

    /// Returns the keys of a group's nodes, for its next owner.
    pub(super) fn handed_off(&self, group: usize) -> Vec<NodeKey> {
        let keys = self.groups[group].read();
        keys.iter().map(|(&node, known)| NodeKey { node, key: *known.key.as_bytes() }).collect()
    }

    /// Signs with the keys of the previous owner until the nodes have a key of this master.
    pub(super) fn took_over(&self, group: usize, keys: Vec<NodeKey>) {
        let signing = |NodeKey { node, key }| {
            (node, SigningKey { session: None, rotation: 0, key: CapabilityKey::new(key) })
        };
        *self.groups[group].write() = keys.into_iter().map(signing).collect();
    }
}

/// Keys that a session has told its node.
#[derive(Debug)]
pub(super) struct OfferedKeys {
    newest: NumberedKey,
    /// Rotation number of the newest key that the node has acknowledged, and when.
    held: (u64, MonoTime),
    /// Whether the newest key is still to be sent on the current stream.
    unsent: bool,
}

impl OfferedKeys {
    /// Starts with the key of the response that opened the session: the process that names the session has it.
    pub(super) fn new(first: NumberedKey, now: MonoTime) -> OfferedKeys {
        OfferedKeys { held: (first.rotation, now), newest: first, unsent: false }
    }

    /// Offers the key of a higher rotation number, unless one is unacknowledged or was acknowledged less than one interval
    /// ago.
    fn offer(&mut self, signer: &CapabilitySigner, node: NodeId, now: MonoTime) -> bool {
        let rotation = signer.rotation(now);
        let (held, since) = self.held;
        if rotation <= held || self.newest.rotation > held || now.since(since) < signer.interval {
            return false;
        }
        (self.newest, self.unsent) = (signer.numbered(node, rotation), true);
        true
    }

    /// Records an acknowledgement. Returns `false` for a key that was not offered last.
    fn acknowledge(&mut self, rotation: u64, now: MonoTime) -> bool {
        if rotation == self.newest.rotation && rotation > self.held.0 {
            self.held = (rotation, now);
        }
        rotation == self.held.0
    }

    /// Sends an unacknowledged key again on a new stream.
    pub(super) fn rewind(&mut self) {
        self.unsent = self.newest.rotation > self.held.0;
    }

    /// Returns the message that offers the newest key, if it is to be sent.
    pub(super) fn next_message(&mut self) -> Option<v1::master_message::Body> {
        use moontide_proto::convert::Wire;
        let unsent = std::mem::take(&mut self.unsent);
        unsent.then(|| v1::master_message::Body::CapabilityKey(self.newest.to_wire()))
    }
}

impl Service {
    /// Offers a new key to the nodes whose last one is old enough.
    pub(super) fn rotate_capability_keys(&self, now: MonoTime) {
        for node in self.nodes.read().values() {
            let offered = node.change_keys(|keys| keys.offer(&self.signer, node.node, now));
            if offered && moontide_rt::mutation_enabled("signed-before-held") {
                self.signer.acknowledged(node.node, node.session(), self.signer.rotation(now));
            }
        }
    }

    /// Records the acknowledgement of a key on the stream of a session.
    pub(super) fn capability_key_held(&self, node: &NodeSession, rotation: u64) {
        if node.change_keys(|keys| keys.acknowledge(rotation, self.now().mono)) {
            self.signer.acknowledged(node.node, node.session(), rotation);
        }
    }

    /// Whether a node may mount segments with the key of this rotation number: it is one of those that its session has told it
    /// last.
    pub(super) fn holds_key(&self, node: &NodeSession, rotation: u64) -> bool {
        node.change_keys(|keys| rotation == keys.held.0 || keys.acknowledge(rotation, self.now().mono))
    }

    /// Signs the sources of the copies among commands.
    pub(super) fn sign_sources(&self, commands: &mut v1::Commands) {
        if commands.sources.is_empty() {
            return;
        }
        let decoded = (
            Packed::<NodeCommand>::decode(&commands.commands, SESSION_RECORDS_MAX),
            Packed::<CopySource>::decode(&commands.sources, SESSION_RECORDS_MAX),
        );
        let (Ok(all), Ok(sources)) = decoded else { unreachable!("encoded by this master") };
        let copies = all.iter().filter(|command| command.kind == CommandKind::Copy);
        let sign = |(command, source): (NodeCommand, CopySource)| {
            let keys = self.signer.keys(self.group_of(command.id));
            let CopySource { node, segment, generation, slot, term, .. } = source;
            let NodeCommand { stripe, epoch, id, .. } = command;
            let right = AccessRight::Read;
            let scope = CapabilityScope { right, stripe, segment, generation, slot, term, epoch, id };
            CopySource {
                capability: keys.of(node).map_or_else(Capability::default, |key| key.sign(&scope)),
                ..source
            }
        };
        let mut signed = PackedBuilder::with_capacity(commands.sources.len() / CopySource::BYTES);
        copies.zip(sources.iter()).map(sign).for_each(|source| signed.push(&source));
        commands.sources = signed.finish().into();
    }
}

/// Right that a response grants for all of its handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantedRight {
    Read,
    Write,
}

/// Signs all handles of a response, together. `keys` has the key of each handle.
pub(super) fn sign_handles(
    right: GrantedRight,
    entries: &[ObjectEntry],
    handles: &mut [Handle],
    keys: &[Option<CapabilityKey>],
) {
    let of_entry = |entry: &ObjectEntry| {
        let (entry, first) = (*entry, entry.first_handle as usize);
        (first..first + usize::from(entry.handle_count)).map(move |at| (at, entry))
    };
    let mut signed_at = Vec::with_capacity(handles.len());
    let mut capabilities = Vec::with_capacity(handles.len());
    let scopes =
        entries.iter().filter(|entry| entry.code.is_none()).flat_map(of_entry).filter_map(|(at, entry)| {
            let (handle, key) = (&handles[at], keys[at].as_ref()?);
            signed_at.push(at);
            let right = match right {
                GrantedRight::Read => AccessRight::Read,
                GrantedRight::Write => AccessRight::Write(RecordShape::granted(&entry, handle)),
            };
            Some((key, CapabilityScope::of_handle(handle, entry.id, entry.epoch, right)))
        });
    sign_all(scopes, &mut capabilities);
    for (at, capability) in signed_at.into_iter().zip(capabilities) {
        handles[at].capability = capability;
    }
}

#[cfg(test)]
mod tests;
