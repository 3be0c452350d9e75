//! Checks of loopback, the ports of a master, a running master, and RDMA.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use moontide_auth::Credentials;
use moontide_bench::http;

use super::{Check, kernel_file, names_in};

/// Default ports of a master: gRPC, frame server, admin HTTP.
const PORTS: [u16; 3] = [7400, 7401, 7402];
/// Long enough for a round trip to another continent.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn loopback() -> Check {
    let check = match echo() {
        Ok(round_trip) => {
            Check::ok("loopback", format!("TCP works; first round trip {} µs", round_trip.as_micros()))
        }
        Err(error) => Check::missing(
            "loopback",
            format!("TCP does not work: {error}"),
            "bring up lo: ip link set lo up",
        ),
    };
    check.needed()
}

/// Sends a byte over loopback and back; returns the round-trip time.
fn echo() -> std::io::Result<Duration> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut client = TcpStream::connect_timeout(&listener.local_addr()?, CONNECT_TIMEOUT)?;
    let (mut server, _) = listener.accept()?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    }
    let started = Instant::now();
    let mut byte = [0x5a];
    client.write_all(&byte)?;
    server.read_exact(&mut byte)?;
    server.write_all(&byte)?;
    client.read_exact(&mut byte)?;
    Ok(started.elapsed())
}

pub(super) fn ports(credentials: Option<&Credentials>) -> Check {
    let mut taken = vec![];
    for port in PORTS {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                taken.push(format!("{port} {}", holder(port, credentials)))
            }
            Err(error) => taken.push(format!("{port} cannot be bound: {error}")),
        }
    }
    let is_master = |text: &String| text.contains("moontide");
    match &taken[..] {
        [] => Check::ok("ports", "7400 to 7402 are free for a master"),
        taken if taken.iter().all(is_master) => Check::ok("ports", taken.join("; ")),
        taken => Check::limited(
            "ports",
            taken.join("; "),
            "choose other ports: moontide master --grpc-listen, --frame-listen and --admin-listen",
        ),
    }
}

/// Describes the user of a port: its process if /proc shows it, else the kind of its response.
fn holder(port: u16, credentials: Option<&Credentials>) -> String {
    if let Some((pid, name)) = listening_process(port) {
        return format!("in use by {name} (pid {pid})");
    }
    let get = |scheme: &str| {
        http::get_as(credentials, &format!("{scheme}127.0.0.1:{port}"), "/role", CONNECT_TIMEOUT)
    };
    // A host may have masters with and without certificates.
    let answer = match get("") {
        Err(http::HttpError::Tls { .. }) => get("http://"),
        other => other,
    };
    match answer {
        Ok(_) => "in use by the admin server of a moontide master".to_owned(),
        Err(http::HttpError::Status { .. }) => "in use by an HTTP server".to_owned(),
        Err(http::HttpError::NeedsCertificate { .. }) => "in use by a server with TLS".to_owned(),
        Err(http::HttpError::Unreachable { .. }) => "bound by a process that does not answer".to_owned(),
        Err(_) => "in use by another process".to_owned(),
    }
}

/// Finds the process that listens on a local port, among the processes whose descriptors are readable.
fn listening_process(port: u16) -> Option<(u32, String)> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| kernel_file(path).unwrap_or_default());
    let inodes: Vec<String> =
        tables.iter().flat_map(|table| table.lines()).filter_map(|line| listener_inode(line, port)).collect();
    let sockets: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let pids = names_in("/proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
    pids.filter(|pid| {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.any(|target| sockets.iter().any(|socket| target.as_os_str() == socket.as_str()))
    })
    .map(|pid| (pid, kernel_file(&format!("/proc/{pid}/comm")).unwrap_or_default()))
    .next()
}

/// Returns the inode in a line of /proc/net/tcp, if it is a socket that listens on the port.
fn listener_inode(line: &str, port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, local_port) = fields.get(1)?.rsplit_once(':')?;
    let is_it = u16::from_str_radix(local_port, 16) == Ok(port) && *fields.get(3)? == LISTEN;
    is_it.then(|| fields.get(9).map(|inode| (*inode).to_owned()))?
}

pub(super) fn master(address: &str) -> Check {
    let started = Instant::now();
    match http::connect(address, started + CONNECT_TIMEOUT) {
        Ok(_) => Check::ok(
            "master",
            format!("{address} accepts connections after {} µs", started.elapsed().as_micros()),
        ),
        Err(error) => Check::missing(
            "master",
            format!("{address}: {error}"),
            "start one with `moontide master` (or `moontide dev`), or pass another address with --master",
        ),
    }
}

pub(super) fn rdma() -> Check {
    let directory = "/sys/class/infiniband";
    let devices = names_in(directory);
    if devices.is_empty() {
        return Check::missing("rdma", "no device in /sys/class/infiniband", "nothing to do: TCP is used");
    }
    let mut is_active = false;
    let mut shown = vec![];
    for device in &devices {
        for port in names_in(&format!("{directory}/{device}/ports")) {
            let file =
                |name| kernel_file(&format!("{directory}/{device}/ports/{port}/{name}")).unwrap_or_default();
            let state = file("state");
            is_active |= state.contains("ACTIVE");
            shown.push(format!("{device}:{port} {state}, {}, {}", file("rate"), file("link_layer")));
        }
    }
    let detail = if shown.is_empty() { devices.join(", ") } else { shown.join("; ") };
    if is_active {
        return Check::ok("rdma", detail);
    }
    Check::limited("rdma", detail, "no port is active; check the cable and `ibstat`; TCP is used until then")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_inode_is_parsed_from_proc_net_tcp() {
        let line = "   0: 0100007F:1CE8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0";
        assert_eq!(listener_inode(line, 7400).as_deref(), Some("4711"));
        assert_eq!(listener_inode(line, 7401), None);
        assert_eq!(listener_inode(&line.replace(" 0A ", " 01 "), 7400), None);
        assert_eq!(listener_inode("  sl  local_address rem_address   st", 7400), None);
    }

    #[test]
    fn listening_process_returns_pid_of_own_listener() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (pid, name) = listening_process(port).unwrap();
        assert_eq!(pid, std::process::id());
        assert!(!name.is_empty());
    }
}
