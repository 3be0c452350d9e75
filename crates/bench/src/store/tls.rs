//! `moontide bench tls`: what mutual TLS costs. Gets, puts and look-ups of two clusters, with certificates and without, and a bare
//! loop with rustls on blocking sockets.

use std::io::{self as std_io, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_auth::rustls::pki_types::ServerName;
use moontide_auth::rustls::{self, ClientConnection, ServerConnection, StreamOwned};
use moontide_auth::{ClientCertificates, CredentialFiles, Credentials, ExpectedServer};
use moontide_client::Store;
use moontide_rt::SplitMix64;

use super::cluster::{BenchCluster, Size};
use super::{BenchEffort, random_bytes};
use crate::measure::{compared, interleave, median, percentiles, relative_range, timed};
use crate::process::{ServerProcess, this_program};
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench tls                        gets and puts of 64 KiB to 16 MiB, and look-ups; a few minutes
  moontide bench tls --quick                two sizes, half a minute; less precise
  moontide bench tls --sizes 1M --seconds 1

Every result is one JSON object per line on standard output. One caller on loopback. The baseline is a process with rustls on
blocking sockets, with the same certificates: a request of 16 bytes, then the payload, without checks and digests.
  get, put         ratio is store with TLS / baseline, ratio_plain is store with TLS / store without, medians of the repeats
  lookup           whether a key exists, asked from the master: calls per second with TLS / without";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    effort: BenchEffort,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ServerArgs {
    /// Directory with the certificates
    #[arg(long)]
    certs: PathBuf,
    /// Bytes of memory that clients read and write
    #[arg(long)]
    bytes: usize,
}

/// Name of the protocol of the baseline over TLS.
const ALPN: &[u8] = b"moontide-bench";

/// Memory of a caller, and of the baseline: larger than the caches of a core.
const ARENA: usize = 64 << 20;

/// The benchmark fails instead of hanging.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An authority and the certificates of a cluster with one node.
struct Certificates(Scratch);

impl Certificates {
    fn issue() -> Result<Certificates, BenchError> {
        let scratch = Scratch::new(&std::env::temp_dir(), "moontide-bench-tls");
        let certificates = Certificates(scratch.map_err(io("creating a directory for certificates"))?);
        for words in [&["init"][..], &["issue"]] {
            let mut command = this_program()?;
            command.arg("certs").args(words).arg(certificates.0.path());
            if words == ["issue"] {
                command.args(["master", "node/bench", "tenant/default"]);
            }
            let status = command.stdout(Stdio::null()).status().map_err(io("running moontide certs"))?;
            if !status.success() {
                return Err(wrong("moontide certs failed; see its error above"));
            }
        }
        Ok(certificates)
    }

    /// Returns the files of a role: the first ones whose names start with `role`.
    fn of(&self, role: &str) -> Result<CredentialFiles, BenchError> {
        files_of(self.0.path(), role)
    }

    /// Returns the settings of a process with this role.
    fn args(&self, role: &str) -> Result<Vec<String>, BenchError> {
        let CredentialFiles { ca, cert, key } = self.of(role)?;
        let settings = [("--ca", ca), ("--cert", cert), ("--key", key)];
        Ok(settings
            .into_iter()
            .flat_map(|(name, file)| [name.to_owned(), file.display().to_string()])
            .collect())
    }
}

fn files_of(directory: &std::path::Path, role: &str) -> Result<CredentialFiles, BenchError> {
    let entries = std::fs::read_dir(directory).map_err(io("listing certificates"))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let name = names.filter_map(|name| Some(name.strip_suffix("-key.pem")?.to_owned()));
    let name = name.into_iter().find(|name| name.starts_with(role));
    let name = name.ok_or_else(|| wrong(format!("moontide certs wrote no certificate of {role}")))?;
    let file = |name: String| directory.join(name);
    Ok(CredentialFiles {
        ca: file("ca.pem".into()),
        cert: file(format!("{name}.pem")),
        key: file(format!("{name}-key.pem")),
    })
}

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let effort = &args.effort;
    let certificates = Certificates::issue()?;
    let node_bytes = (2 * effort.set_bytes()).next_multiple_of(1 << 30);
    let size = Size { nodes: 1, node_bytes, groups: 1 };
    let plain_cluster = BenchCluster::start(size)?;
    let tls_cluster =
        BenchCluster::start_with_args(size, &certificates.args("master")?, &certificates.args("node")?)?;
    let plain = plain_cluster.store(|config| config.shm = false)?;
    let tenant = certificates.of("tenant")?;
    let tls = tls_cluster.store(|config| {
        config.shm = false;
        (config.ca, config.cert, config.key) = (Some(tenant.ca), Some(tenant.cert), Some(tenant.key));
    })?;
    let stores = [&tls, &plain];
    lookups(stores, effort)?;
    let baseline = Baseline::start(&certificates)?;
    let sizes = effort.sizes();
    let mut progress = Progress::new(format!("tls, {} sizes", sizes.len()), 2 * sizes.len() as u64);
    for (done, &bytes) in sizes.iter().enumerate() {
        let mut connection = baseline.connect(&certificates)?;
        gets(stores, &mut connection, bytes, effort)?;
        progress.at(2 * done as u64 + 1);
        puts(stores, &mut connection, bytes, effort)?;
        progress.at(2 * done as u64 + 2);
    }
    if effort.gate { check_gates() } else { Ok(()) }
}

/// Measures gets: with TLS, without, and of the bare loop.
fn gets(
    stores: [&Store; 2],
    connection: &mut BaselineConnection,
    bytes: u64,
    effort: &BenchEffort,
) -> Result<(), BenchError> {
    let len = bytes as usize;
    let count = (effort.set_bytes() / 2 / bytes).clamp(8, 4096) as usize;
    let keys: Vec<String> = (0..count).map(|n| format!("get-{bytes}-{n}")).collect();
    let content = random_bytes(effort.seed, len);
    for store in stores {
        for key in &keys {
            store.put(key.as_bytes(), &content).map_err(wrong)?;
        }
    }
    let mut memory = vec![1u8; ARENA.max(len)];
    let offsets = memory.len() / len;
    let sides = interleave(effort.repeats(), |side, repeat| {
        let mut rng = SplitMix64::new(effort.seed ^ repeat << 8 ^ side as u64);
        let (connection, memory, keys) = (&mut *connection, &mut memory, &keys);
        let mover = move || {
            let into = &mut memory[rng.index(offsets) * len..][..len];
            let Some(store) = stores.get(side) else {
                return connection.get(rng.next_u64(), into).map_err(io("a baseline get"));
            };
            let found = store.get_into(keys[rng.index(keys.len())].as_bytes(), into).map_err(wrong)?;
            if found == Some(len) { Ok(()) } else { Err(wrong("an object is missing")) }
        };
        timed(vec![mover], effort.span(), bytes)
    });
    let [tls, plain, baseline] = sides?;
    let line = ResultRow::new("tls", "get").with("bytes", bytes);
    let line = compared(line, &tls, &baseline, (bytes == 1 << 20).then_some(0.85));
    let over_plain = median(tls.over(&plain));
    match bytes == 1 << 20 {
        true => line.with_second_target("ratio_plain", over_plain, 0.45, true),
        false => line.number("ratio_plain", over_plain),
    }
    .print();
    remove(stores, &keys)
}

/// Measures puts: with TLS, without, and of the bare loop.
fn puts(
    stores: [&Store; 2],
    connection: &mut BaselineConnection,
    bytes: u64,
    effort: &BenchEffort,
) -> Result<(), BenchError> {
    let len = bytes as usize;
    let memory = random_bytes(effort.seed, ARENA.max(len));
    let offsets = memory.len() / len;
    let mut number = 0;
    let sides = interleave(effort.repeats(), |side, repeat| {
        let mut rng = SplitMix64::new(effort.seed ^ repeat << 8 ^ side as u64);
        let mut written: Vec<String> = vec![];
        let (connection, memory) = (&mut *connection, &memory);
        let (number, keys) = (&mut number, &mut written);
        let mover = move || {
            let from = &memory[rng.index(offsets) * len..][..len];
            let Some(store) = stores.get(side) else {
                return connection.put(rng.next_u64(), from).map_err(io("a baseline put"));
            };
            *number += 1;
            let key = format!("put-{bytes}-{number}");
            store.put(key.as_bytes(), from).map_err(wrong)?;
            keys.push(key);
            Ok(())
        };
        let run = timed(vec![mover], effort.span(), bytes)?;
        // Frees space for the next measurement; not measured.
        if let Some(&store) = stores.get(side) {
            remove([store], &written)?;
        }
        Ok(run)
    });
    let [tls, plain, baseline] = sides?;
    let line = ResultRow::new("tls", "put").with("bytes", bytes);
    let line = compared(line, &tls, &baseline, None);
    line.number("ratio_plain", median(tls.over(&plain))).print();
    Ok(())
}

fn remove<const N: usize>(stores: [&Store; N], keys: &[String]) -> Result<(), BenchError> {
    let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
    for store in stores {
        for removed in store.remove_batch(&keys, true) {
            removed.map_err(wrong)?;
        }
    }
    Ok(())
}

/// Measures look-ups at the master, with TLS and without.
fn lookups(stores: [&Store; 2], effort: &BenchEffort) -> Result<(), BenchError> {
    for store in stores {
        store.put(b"there", b"bytes").map_err(wrong)?;
    }
    let side = |side: usize| {
        let store = stores[side];
        let mover = move || match store.exists(b"there").map_err(wrong)? {
            true => Ok(()),
            false => Err(wrong("an object is missing")),
        };
        timed(vec![mover], effort.span(), 1)
    };
    let sides = interleave(effort.repeats(), |which, _| side(which));
    let [tls, plain] = sides?;
    let ratios = tls.over(&plain);
    let line = ResultRow::new("tls", "lookup")
        .number("calls_per_s", tls.rate())
        .number("plain_calls_per_s", plain.rate())
        .with_target("ratio", median(ratios.clone()), 0.85, true)
        .number("ratio_range", relative_range(&ratios));
    percentiles(line, &tls.took()).number("plain_p50_us", plain.took().micros(0.5)).print();
    remove(stores, &["there".to_owned()])
}

// -------------------------------------------------------------------------------------------------------- the bare loop

/// Request of the bare loop: position in the server's memory and length, with a bit for the direction; little-endian.
const REQUEST_BYTES: usize = 16;
const PUT: u64 = 1 << 63;

/// Process with the bare loop, which is stopped on drop.
struct Baseline {
    _server: ServerProcess,
    address: SocketAddr,
}

impl Baseline {
    fn start(certificates: &Certificates) -> Result<Baseline, BenchError> {
        let directory = certificates.0.path().display().to_string();
        let bytes = ARENA.to_string();
        let args = ["bench", "tls-server", "--certs", &directory, "--bytes", &bytes];
        let (server, lines) = ServerProcess::start(&args, "listening ")?;
        let address = lines.last().and_then(|line| line.strip_prefix("listening ")?.parse().ok());
        let address = address.ok_or_else(|| wrong("the baseline printed no address"))?;
        Ok(Baseline { _server: server, address })
    }

    fn connect(&self, certificates: &Certificates) -> Result<BaselineConnection, BenchError> {
        let credentials = Credentials::load(certificates.of("tenant")?).map_err(wrong)?;
        // The server has the certificate of the master.
        let config = credentials.client(ExpectedServer::Master, &[ALPN]);
        let name = ServerName::try_from("moontide").expect("a valid name");
        let connection = ClientConnection::new(config, name).map_err(wrong)?;
        let connect = || {
            let stream = TcpStream::connect(self.address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.set_write_timeout(Some(TIMEOUT))?;
            Ok(stream)
        };
        let stream = connect().map_err(io("connecting to the baseline"))?;
        Ok(BaselineConnection(StreamOwned::new(connection, stream)))
    }
}

/// A connection to the bare loop.
struct BaselineConnection(StreamOwned<ClientConnection, TcpStream>);

impl BaselineConnection {
    fn request(&mut self, at: u64, len: usize, direction: u64) -> std_io::Result<()> {
        let mut request = [0; REQUEST_BYTES];
        request[..8].copy_from_slice(&at.to_le_bytes());
        request[8..].copy_from_slice(&(len as u64 | direction).to_le_bytes());
        self.0.write_all(&request)
    }

    fn get(&mut self, at: u64, into: &mut [u8]) -> std_io::Result<()> {
        self.request(at, into.len(), 0)?;
        self.0.read_exact(into)
    }

    fn put(&mut self, at: u64, from: &[u8]) -> std_io::Result<()> {
        self.request(at, from.len(), PUT)?;
        self.0.write_all(from)?;
        self.0.read_exact(&mut [0])
    }
}

/// Serves the bare loop until the process is ended.
pub(crate) fn run_server(args: &ServerArgs) -> Result<(), BenchError> {
    let credentials = Credentials::load(files_of(&args.certs, "master")?).map_err(wrong)?;
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(io("listening"))?;
    println!("listening {}", listener.local_addr().map_err(io("listening"))?);
    for stream in listener.incoming() {
        let config = credentials.server(ClientCertificates::Required, &[ALPN]);
        let served = stream.and_then(|stream| serve(stream, config, args.bytes));
        match served {
            Err(error) if error.kind() != std_io::ErrorKind::UnexpectedEof => {
                return Err(BenchError::Io { what: "serving a baseline connection", source: error });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Answers requests until the peer closes the connection.
fn serve(stream: TcpStream, config: Arc<rustls::ServerConfig>, bytes: usize) -> std_io::Result<()> {
    stream.set_nodelay(true)?;
    let connection = ServerConnection::new(config).map_err(std_io::Error::other)?;
    let mut stream = StreamOwned::new(connection, stream);
    let mut memory = random_bytes(1, bytes);
    loop {
        let mut request = [0; REQUEST_BYTES];
        stream.read_exact(&mut request)?;
        let word = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().expect("8 bytes"));
        let (at, len) = (word(0), (word(8) & !PUT) as usize);
        if len == 0 || len > bytes {
            return Err(std_io::ErrorKind::InvalidInput.into());
        }
        let at = (at % (bytes / len) as u64) as usize * len;
        let memory = &mut memory[at..at + len];
        if word(8) & PUT == 0 {
            stream.write_all(memory)?;
        } else {
            stream.read_exact(memory)?;
            stream.write_all(&[1])?;
        }
    }
}
