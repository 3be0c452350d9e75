//! Messages of a master to a node, and segments of a node.

use super::*;

impl Gen {
    pub(crate) fn master_message(&mut self) -> v1::MasterMessage {
        use v1::master_message::Body;
        let n = self.below(6) as usize;
        let body = match self.below(5) {
            0 | 1 => Body::Commands(self.commands(n)),
            2 | 3 => Body::HeartbeatAck(v1::HeartbeatAck {
                heartbeat_id: self.u64(),
                ttl_ms: 1 + self.below(600_000) as u32,
                in_sync: (0..n as u32).map(|group| v1::GroupExclusion { group, exclusion: 7 }).collect(),
                flush: self.bool().then(|| v1::FlushStatus {
                    objects: self.u64(),
                    bytes: self.u64(),
                    refused: self.u64(),
                }),
                drain: self.bool().then(|| self.bool()),
            }),
            _ => Body::CapabilityKey(self.capability_key()),
        };
        v1::MasterMessage {
            session: 1 + self.below(u64::MAX),
            term: self.term().get(),
            map_version: self.u64(),
            acked_sequence: self.u64(),
            body: Some(body),
        }
    }

    pub(crate) fn capability_key(&mut self) -> v1::CapabilityKey {
        v1::CapabilityKey { rotation: self.u64().max(1), key: self.byte_string(32, 32).into() }
    }

    pub(crate) fn handoff_key(&mut self) -> v1::HandoffKey {
        v1::HandoffKey { node: self.u64().max(1), key: self.byte_string(32, 32).into() }
    }

    pub(crate) fn node_detail(&mut self, addresses: usize) -> v1::NodeDetail {
        v1::NodeDetail {
            node: self.u64().max(1),
            registration: self.u64().max(1),
            addresses: self.addresses(addresses),
            topology: Some(self.topology()),
            draining: self.bool(),
        }
    }

    pub(crate) fn commands(&mut self, n: usize) -> v1::Commands {
        let commands: Vec<NodeCommand> = (0..n).map(|_| self.command()).collect();
        let copies = commands.iter().filter(|command| command.kind == CommandKind::Copy).count();
        v1::Commands {
            commands: commands.into_iter().collect::<PackedBuilder<NodeCommand>>().finish().into(),
            sources: self.packed(copies, Gen::copy_source),
            nodes: (0..self.below(3)).map(|_| self.node_detail(2)).collect(),
        }
    }

    pub(crate) fn segment_spec(&mut self) -> v1::SegmentSpec {
        let disk = self.below(8) == 0;
        v1::SegmentSpec {
            segment: if disk { 65_535 } else { self.below(65_535) as u32 },
            generation: self.u64(),
            medium: if disk { 3 } else { 1 + self.below(2) as i32 },
            units: self.u32().max(1),
            slots: (self.u32() >> 1).max(1),
            numa: self.below(3) as u32,
            group: self.bool().then(|| self.below(4096) as u32),
            term: self.term().get(),
            has_records: self.bool(),
            tenant: self.text(0, 9),
        }
    }
}
