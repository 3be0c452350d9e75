//! A blocking link has no thread of its own. This test is alone in its file, because other tests of a process have
//! threads, too.

mod server;

use std::thread;

use moontide_client::{BlockingLink, LinkConfig};
use moontide_proto::convert::CallerId;
use moontide_types::{Key, Tenant};
use server::{Server, eventually};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("Linux").count()
}

#[test]
fn blocking_link_leaks_no_threads() {
    let before = threads();
    {
        let server = Server::start();
        let port = server.address.rsplit(':').next().expect("a port").to_owned();
        let name = format!("localhost:{port}"); // resolving takes a thread, for a moment
        let link = BlockingLink::connect(LinkConfig::new(name, CallerId(1))).expect("the server listens");
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let key = Key::new(&[2]).expect("a key");
                        assert_eq!(link.exist_one(Tenant::DEFAULT, key).expect("a reply"), Ok(true));
                    }
                });
            }
        });
        // The server accepts on one thread and serves on another.
        eventually("only the threads of the server", || threads() == before + 2);
    }
    eventually("as many as before", || threads() == before);
}
