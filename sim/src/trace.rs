//! One human-readable line for each event.

use std::fmt::Write;

use moontide_proto::convert::{
    GetReplicaListResponse, MasterMessage, MasterMessageBody, NodeMessage, NodeMessageBody, ObjectList,
    OutcomesResponse, PutEndRequest, PutStartResponse, Wire,
};
use moontide_proto::{Handle, PackedKeys, v1};
use moontide_types::ObjectId;

use crate::client::key_of;
use crate::event::{Event, MasterReply, Message, NodeOp, NodeRequest, NodeResponse, Request};

/// Formats an event.
pub(crate) fn line(event: &Event) -> String {
    match event {
        Event::Deliver(envelope) => {
            format!("{:?} → {:?}: {}", envelope.from, envelope.to, message(&envelope.message))
        }
        other => format!("{other:?}"),
    }
}

fn message(message: &Message) -> String {
    match message {
        Message::Call { call, request } => format!("call {call:x}: {}", request_text(request)),
        Message::Reply { call, reply } => format!("reply {call:x}: {}", reply_text(reply)),
        Message::Ask { call, ask } => format!("ask {call:x}: {}", of_node(ask)),
        Message::NodeCall { call, request } => match request {
            NodeRequest::Open(m) => format!("call {call:x}: open session, boot {:x}", m.boot_id),
            NodeRequest::Mount(m) => format!("call {call:x}: mount {:?}", m.segments),
            NodeRequest::Map(_) => format!("call {call:x}: map"),
            NodeRequest::Unmount(m) => format!("call {call:x}: unmount {:?}", m.segments),
            NodeRequest::Info(_) => format!("call {call:x}: cluster"),
        },
        Message::NodeResponse { call, reply } => match reply {
            NodeResponse::Opened(m) => format!("reply {call:x}: session {:?}", m.session),
            NodeResponse::Mounted(m) => format!("reply {call:x}: mounted {:?}", m.results),
            NodeResponse::Map(m) => format!("reply {call:x}: {}", map(m)),
            NodeResponse::Unmounted(_) => format!("reply {call:x}: unmounted"),
            NodeResponse::Info(_) => format!("reply {call:x}: cluster"),
        },
        Message::FromNode { stream, message } => {
            let body = match NodeMessage::from_wire(message).map(|m| m.body) {
                Ok(NodeMessageBody::Heartbeat(heartbeat)) => format!("heartbeat {}", heartbeat.heartbeat_id),
                Ok(NodeMessageBody::CommandResults(results)) => {
                    let each = results
                        .iter()
                        .map(|r| format!("{} {:?} {:?} {:?}", r.command_id, r.status, r.code, r.word));
                    format!("results {}", each.collect::<Vec<_>>().join("; "))
                }
                Ok(NodeMessageBody::Report(chunk)) => {
                    let each = chunk
                        .records
                        .iter()
                        .map(|r| format!("slot {} {:?} key {:?}", r.slot.0, r.word, key_of(r.id)));
                    let (segment, first) = (chunk.segment.0, chunk.first_record);
                    format!(
                        "report of segment {segment} from {first}: {}",
                        each.collect::<Vec<_>>().join("; ")
                    )
                }
                Ok(body) => format!("{body:?}"),
                Err(error) => error.to_string(),
            };
            format!("stream {stream:x} #{}: {body}", message.sequence)
        }
        Message::FromMaster { stream, message } => {
            let body = match MasterMessage::from_wire(message).map(|m| m.body) {
                Ok(MasterMessageBody::Commands(commands)) => {
                    let each = commands.commands.iter().map(|o| {
                        let (segment, slot) = (o.segment.0, o.slot.0);
                        format!(
                            "{} {:?} {segment}/{slot} {} key {:?}",
                            o.command_id,
                            o.kind,
                            o.epoch,
                            key_of(o.id)
                        )
                    });
                    format!("commands {}", each.collect::<Vec<_>>().join("; "))
                }
                Ok(body) => format!("{body:?}"),
                Err(error) => error.to_string(),
            };
            format!("stream {stream:x} acks {}: {body}", message.acked_sequence)
        }
        Message::Handoff { call, group, handoff } => {
            let (objects, segments) = (handoff.objects.len(), handoff.segments.len());
            let all = handoff.segments_complete;
            format!("handoff {call:x} of {group:?}: {objects} objects, {segments} segments, all {all}")
        }
        other => format!("{other:?}"),
    }
}

fn map(reply: &v1::GetGroupMapResponse) -> String {
    let Some(map) = &reply.map else { return "no map".to_owned() };
    let each = map.masters.iter().map(|m| format!("{} {:?} {:?}", m.grpc_address, m.groups, m.terms));
    format!("map {}: {}", map.version, each.collect::<Vec<_>>().join("; "))
}

fn request_text(request: &Request) -> String {
    let keys = |bytes: &[u8]| match PackedKeys::decode(bytes) {
        Ok(keys) => keys.iter().map(|key| String::from_utf8_lossy(key.as_bytes()).into_owned()).collect(),
        Err(error) => error.to_string(),
    };
    match request {
        Request::PutStart(m) => format!("PutStart {} {:?}", keys(&m.keys), m.configs),
        Request::PutEnd(m) => match PutEndRequest::from_wire(m) {
            Ok(end) => {
                let each = end.entries.iter().map(|e| {
                    let outcomes = &e.outcomes[..e.replica_count.into()];
                    format!("key {:?} {} {outcomes:?}", key_of(e.id), e.epoch)
                });
                format!("PutEnd {}", each.collect::<String>())
            }
            Err(error) => error.to_string(),
        },
        Request::Revoke(_) => "Revoke".to_owned(),
        Request::Lookup(m) => format!("Lookup {} lease {}", keys(&m.keys), m.lease_ms),
        Request::Exist(m) => format!("Exist {}", keys(&m.keys)),
        Request::Touch(m) => format!("Touch {}", keys(&m.keys)),
        Request::Remove(m) => format!("Remove {} force {}", keys(&m.keys), m.force),
        Request::Map(_) => "map".to_owned(),
    }
}

fn reply_text(reply: &MasterReply) -> String {
    match reply {
        MasterReply::Started(m) => match PutStartResponse::from_wire(m).map(|reply| reply.into_result()) {
            Ok(Ok(reservations)) => format!("started {}", objects(&reservations.list)),
            other => format!("{:?}", other.map(|result| result.map(|_| ()))),
        },
        MasterReply::Found(m) => {
            match GetReplicaListResponse::from_wire(m).map(|reply| reply.into_result()) {
                Ok(Ok(replicas)) => format!("found {}", objects(&replicas.list)),
                other => format!("{:?}", other.map(|result| result.map(|_| ()))),
            }
        }
        MasterReply::Map(m) => map(m),
        MasterReply::Present(m) => format!("present {:?}", m.present),
        MasterReply::Outcomes(m) => match OutcomesResponse::from_wire(m).map(|reply| reply.into_result()) {
            Ok(Ok(outcomes)) => format!("outcomes {:?}", outcomes.codes.iter().collect::<Vec<_>>()),
            other => format!("{:?}", other.map(|result| result.map(|_| ()))),
        },
    }
}

fn objects(list: &ObjectList<'_>) -> String {
    let mut text = String::new();
    for (object, handles) in list.iter() {
        // Writing to a string does not fail.
        let _ = match object.code {
            Some(code) => write!(text, "{code} "),
            None => write!(text, "key {:?} {} {} bytes ", key_of(object.id), object.epoch, object.object_len),
        };
        handles.iter().for_each(|handle| text.push_str(&location(&handle)));
    }
    text
}

fn location(handle: &Handle) -> String {
    format!("[node {} segment {} slot {}]", handle.node, handle.segment.0, handle.slot.0)
}

fn of_node(ask: &NodeOp) -> String {
    let named = |id: ObjectId| key_of(id);
    match ask {
        NodeOp::Begin { object, handle, .. } => {
            format!("Begin key {:?} {} {}", named(object.id), object.epoch, location(handle))
        }
        NodeOp::Write { object, handle, .. } => {
            format!("Write key {:?} {} {}", named(object.id), object.epoch, location(handle))
        }
        NodeOp::Commit(entry) => format!("Commit key {:?} {}", named(entry.id), entry.epoch),
        NodeOp::Read { id, epoch, handle } => {
            format!("Read key {:?} {epoch} {}", named(*id), location(handle))
        }
    }
}
