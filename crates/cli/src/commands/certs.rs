//! `moontide certs`: a certificate authority for a cluster, the certificates of its processes, and a look at a certificate.
//!
//! The authority is meant for development and for clusters without one of their own. Its key is a file that only its owner can read.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_auth::{CertificateInfo, Identity, Role, certificate_info};
use moontide_types::NodeId;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

use super::{CommandError, ignore_broken_pipe};

const INIT_EXAMPLES: &str = "\
Examples:
  moontide certs init certs                               an authority in the directory certs, for the cluster \"main\"
  moontide certs init certs --cluster prod --trust-domain example.org

It creates ca.pem, which every process gets, and ca-key.pem, which no process gets: keep it where certificates are issued.";

const ISSUE_EXAMPLES: &str = "\
Examples:
  moontide certs issue certs master                       certs/master.pem and certs/master-key.pem
  moontide certs issue certs node                         a node with a new id, which is part of the names of the files
  moontide certs issue certs node/rack1-host7             a node whose id follows from a name
  moontide certs issue certs tenant/acme operator scraper --days 30

A process uses them with --ca certs/ca.pem --cert certs/master.pem --key certs/master-key.pem, or with the variables MOONTIDE_CA,
MOONTIDE_CERT and MOONTIDE_KEY. To renew a certificate, issue it again: processes read the new files without a restart.";

const SHOW_EXAMPLES: &str = "\
Examples:
  moontide certs show certs/master.pem                    identity and expiry";

/// Names of the files of an authority.
const CA_CERT: &str = "ca.pem";
const CA_KEY: &str = "ca-key.pem";

/// Lifetime of an authority's certificate.
const CA_DAYS: u64 = 3650;

/// Certificates are valid from an hour before their issue, for hosts whose clocks are behind.
const CLOCK_MARGIN: Duration = Duration::from_secs(3600);

const DAY: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, ClapArgs)]
struct InitArgs {
    /// Directory of the authority; created with access for its owner only
    directory: PathBuf,
    /// Name of the cluster whose processes get certificates
    #[arg(long, default_value = "main")]
    cluster: String,
    /// Name of the authority in the identities, a DNS name of yours
    #[arg(long, default_value = "moontide.local")]
    trust_domain: String,
}

#[derive(Debug, ClapArgs)]
struct IssueArgs {
    /// Directory of the authority
    directory: PathBuf,
    /// Roles: master, node, node/ID, operator, scraper, tenant/NAME
    #[arg(required = true)]
    roles: Vec<String>,
    /// Lifetime of the certificates in days
    #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=3650))]
    days: u64,
}

#[derive(Debug, ClapArgs)]
struct ShowArgs {
    /// Files with certificates in PEM format
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

pub(crate) fn command() -> Command {
    Command::new("certs")
        .about("Create certificates for TLS, and show them")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .after_help(
            "Examples:\n  moontide certs init certs\n  moontide certs issue certs master node tenant/default operator\n  \
             moontide certs show certs/master.pem",
        )
        .subcommand(
            InitArgs::augment_args(Command::new("init"))
                .about("Create a certificate authority for a cluster")
                .after_help(INIT_EXAMPLES),
        )
        .subcommand(
            IssueArgs::augment_args(Command::new("issue"))
                .about("Issue certificates for processes of a cluster")
                .after_help(ISSUE_EXAMPLES),
        )
        .subcommand(
            ShowArgs::augment_args(Command::new("show"))
                .about("Show identity and expiry of certificates")
                .after_help(SHOW_EXAMPLES),
        )
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    match matches.subcommand() {
        Some(("init", matches)) => init(&InitArgs::from_arg_matches(matches).map_err(CommandError::usage)?),
        Some(("issue", matches)) => {
            issue(&IssueArgs::from_arg_matches(matches).map_err(CommandError::usage)?)
        }
        Some(("show", matches)) => show(&ShowArgs::from_arg_matches(matches).map_err(CommandError::usage)?),
        _ => unreachable!("clap requires one of the subcommands above"),
    }
}

fn init(args: &InitArgs) -> Result<(), CommandError> {
    // Checks both names.
    Identity::new(&args.trust_domain, &args.cluster, Role::Master).map_err(CommandError::usage)?;
    let directory = &args.directory;
    let found = [CA_CERT, CA_KEY].into_iter().find(|name| directory.join(name).exists());
    if let Some(name) = found {
        let path = directory.join(name);
        return Err(CommandError::usage(format!(
            "{} exists; issue certificates with `moontide certs issue {}`, or name another directory",
            path.display(),
            directory.display()
        )));
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|error| CommandError::failed(format!("cannot create {}: {error}", directory.display())))?;
    let mut params = CertificateParams::new(vec![]).map_err(CommandError::failed)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, "Moontide CA");
    params.distinguished_name.push(DnType::OrganizationalUnitName, args.cluster.as_str());
    let uri = format!("spiffe://{}", args.trust_domain);
    params.subject_alt_names.push(SanType::URI(uri.try_into().map_err(CommandError::usage)?));
    set_validity(&mut params, CA_DAYS);
    let key = KeyPair::generate().map_err(CommandError::failed)?;
    let certificate = params.self_signed(&key).map_err(CommandError::failed)?;
    write(&directory.join(CA_KEY), &key.serialize_pem(), Access::Owner)?;
    write(&directory.join(CA_CERT), &certificate.pem(), Access::All)?;
    let directory = directory.display();
    let text = format!(
        "created {directory}/{CA_CERT} and {directory}/{CA_KEY}\nnext: moontide certs issue {directory} master node operator tenant/default"
    );
    ignore_broken_pipe(writeln!(io::stdout(), "{text}"))
}

fn issue(args: &IssueArgs) -> Result<(), CommandError> {
    let directory = &args.directory;
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read_to_string(&path).map_err(|error| {
            CommandError::usage(format!(
                "cannot read {}: {error}; create an authority with `moontide certs init {}`",
                path.display(),
                directory.display()
            ))
        })
    };
    let (ca, ca_key) = (read(CA_CERT)?, read(CA_KEY)?);
    let unusable = |error: rcgen::Error| {
        CommandError::failed(format!("authority in {} cannot be used: {error}", directory.display()))
    };
    let issuer =
        Issuer::from_ca_cert_pem(&ca, KeyPair::from_pem(&ca_key).map_err(unusable)?).map_err(unusable)?;
    let namespace = moontide_auth::authority_namespace(&ca).map_err(CommandError::failed)?;
    // All roles are checked before the first file is written.
    let identities: Vec<Identity> =
        args.roles.iter().map(|role| identity(&namespace, role)).collect::<Result<_, _>>()?;
    for identity in &identities {
        let mut params = CertificateParams::new(vec![]).map_err(CommandError::failed)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.distinguished_name.push(DnType::CommonName, identity.role().to_string());
        let uri = identity.to_string().try_into().map_err(CommandError::failed)?;
        params.subject_alt_names.push(SanType::URI(uri));
        set_validity(&mut params, args.days);
        let key = KeyPair::generate().map_err(CommandError::failed)?;
        let certificate = params.signed_by(&key, &issuer).map_err(CommandError::failed)?;
        let name = identity.role().to_string().replace('/', "-");
        let (cert_path, key_path) =
            (directory.join(format!("{name}.pem")), directory.join(format!("{name}-key.pem")));
        // The key first: a process that looks in between keeps the earlier pair, because these two do not belong together.
        write(&key_path, &key.serialize_pem(), Access::Owner)?;
        write(&cert_path, &certificate.pem(), Access::All)?;
        let text = format!("{identity}: {} and {}", cert_path.display(), key_path.display());
        ignore_broken_pipe(writeln!(io::stdout(), "{text}"))?;
    }
    Ok(())
}

/// Returns the identity of a role as it is written on the command line. `node` alone gets a new id.
fn identity(namespace: &str, role: &str) -> Result<Identity, CommandError> {
    let role = match role {
        "node" => {
            let mut id = [0; 8];
            rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
                .map_err(|error| CommandError::failed(format!("no random numbers: {error}")))?;
            Role::Node(NodeId(u64::from_le_bytes(id).max(1))).to_string()
        }
        role => role.to_owned(),
    };
    format!("{namespace}/{role}").parse().map_err(CommandError::usage)
}

fn show(args: &ShowArgs) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    for path in &args.files {
        let CertificateInfo { identity, expires_unix_s } =
            certificate_info(path).map_err(CommandError::failed)?;
        let now =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
        let left = expires_unix_s - now;
        let path = path.display();
        ignore_broken_pipe(if args.json {
            let object = serde_json::json!({
                "file": path.to_string(),
                "identity": identity.to_string(),
                "expires_unix_s": expires_unix_s,
                "expires_in_s": left,
            });
            writeln!(out, "{object}")
        } else {
            let days = left / DAY.as_secs() as i64;
            let validity = if left < 0 { "EXPIRED".to_owned() } else { format!("expires in {days} days") };
            writeln!(out, "{path}: {identity}, {validity}")
        })?;
    }
    Ok(())
}

fn set_validity(params: &mut CertificateParams, days: u64) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_MARGIN).into();
    params.not_after = (now + DAY * days as u32).into(); // ≤ 3,650
}

/// Who may read a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Owner,
    All,
}

/// Replaces a file as a whole: a process that reads it meanwhile finds the old content or the new one.
fn write(path: &Path, text: &str, access: Access) -> Result<(), CommandError> {
    let temporary = path.with_extension("pem.new");
    let mode = if access == Access::Owner { 0o600 } else { 0o644 };
    let written = (|| {
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    written.map_err(|error| CommandError::failed(format!("cannot write {}: {error}", path.display())))
}
