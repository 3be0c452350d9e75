//! Requests that no client of this project sends: records under the id of another key, records whose bytes are not all
//! written, and records without digests.

mod support;

use moontide_proto::{CommitFlags, ObjectFlags};
use moontide_transfer::{Link, Op, run};
use moontide_types::{ErrorCode, ObjectId, TenantGeneration};
use support::*;

/// The two ways to a node: over the network, and as a process of its host.
fn links(node: &moontide_node::Node) -> [(&'static str, std::sync::Arc<dyn Link>); 2] {
    [("tcp", tcp(node)), ("shm", shm(node))]
}

#[test]
fn record_under_an_id_of_another_key_is_refused() {
    // Failure: a caller that reached the port of a node stored bytes of its own under the id of another tenant's object, and the
    // next get on that host returned them. Cause: the node took the id from the request. Fix: it computes the id itself.
    init_logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    for (engine, link) in links(&node) {
        let own = client.put_start_soon(&format!("own-{engine}"), 1000);
        let begin_with = |change: &dyn Fn(&mut Reserved)| {
            let mut forged = own.clone();
            change(&mut forged);
            begin(&*link, &forged)
        };
        let victim: ObjectId = client.id("victim");
        let refused = Some(ErrorCode::PermissionDenied);
        assert_eq!(begin_with(&|forged| forged.object.id = victim), refused, "{engine}: another id");
        assert_eq!(begin_with(&|forged| forged.name = "victim".into()), refused, "{engine}: another key");
        assert_eq!(begin_with(&|forged| forged.object.id_key ^= 1), refused, "{engine}: another id key");
        let generation = TenantGeneration(1);
        let other_generation = begin_with(&|forged| forged.object.tenant_generation = generation);
        assert_eq!(other_generation, refused, "{engine}: another generation of the tenant");
        assert_eq!(begin_with(&|_| ()), None, "{engine}: the record as granted");
    }
}

#[test]
fn record_without_digests_is_refused_in_memory_of_an_ordinary_node() {
    // Failure: a client committed records that it had not written, and read what other tenants had stored in that memory.
    // Cause: no bytes were compared with a digest. Fix: only nodes in the memory of ranks accept records without digests.
    init_logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    for (engine, link) in links(&node) {
        let mut reserved = client.put_start_soon(engine, 1000);
        let flags = reserved.object.flags;
        reserved.object.flags = flags.with(ObjectFlags::DIGESTLESS);
        assert_eq!(begin(&*link, &reserved), Some(ErrorCode::PermissionDenied), "{engine}: another shape");
        reserved.object.flags = flags;
        assert_eq!(begin(&*link, &reserved), None, "{engine}: with digests");
        // As the master granted it.
        let bare = client.put_start_digestless(&format!("bare-{engine}"), 1000).unwrap();
        assert!(bare.object.flags.contains(ObjectFlags::DIGESTLESS));
        assert_eq!(begin(&*link, &bare), Some(ErrorCode::Unsupported), "{engine}");
    }
}

#[test]
fn record_with_unwritten_bytes_is_not_committed() {
    // Failure: the memory of a record that was begun and committed without its bytes showed what another tenant had stored
    // there. Cause: Commit compared only digests. Fix: the node knows which bytes have arrived.
    init_logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let bytes = content(3, 700_000);
    let reserved = client.put_start_soon("k", bytes.len() as u64);
    assert_eq!(begin(&*link, &reserved), None);
    let root = digest_context(&reserved).payload(&bytes, |_| ());
    let write_part = |from: usize, to: usize| {
        let mut ops = [Op::put(reserved.target(), from as u64, &bytes[from..to])];
        run(&*link, &mut ops, deadline()).unwrap();
        assert_eq!(ops[0].outcome(), Some(Ok(())));
    };
    // A right root and a wrong one are refused alike: the refusal does not tell what is in the memory.
    let refused = || [root, root ^ 1].map(|root| commit(&*link, &reserved, root, CommitFlags::NONE));
    let incomplete = [Some(ErrorCode::InvalidArgument); 2];
    assert_eq!(refused(), incomplete, "nothing is written");
    write_part(0, 400_000);
    write_part(400_001, bytes.len());
    assert_eq!(refused(), incomplete, "one byte is missing");
    write_part(400_000, 400_001);
    assert_eq!(commit(&*link, &reserved, root ^ 1, CommitFlags::NONE), Some(ErrorCode::Corrupt));
    assert_eq!(commit(&*link, &reserved, root, CommitFlags::NONE), None);
    assert_eq!(client.put_end(&reserved, root), None);
    assert!(client.get(&*link, "k").unwrap() == bytes);
}
