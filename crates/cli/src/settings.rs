//! [`SettingsArgs`]: the flags of a component, generated from the table of its settings.
//!
//! `moontide master`, `moontide node` and the commands on objects use it, so that help texts, printed files and effective
//! settings agree.

use std::io::Write;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Args as ClapArgs, Command, FromArgMatches, value_parser};
use moontide_auth::{CredentialFiles, Credentials};
use moontide_client::StoreConfig;
use moontide_master::MasterConfig;
use moontide_node::NodeConfig;
use moontide_settings::{
    Component, Form, Loaded, Setting, SettingsError, load, process_environment, to_toml,
};
use tracing::warn;

use crate::commands::{CommandError, ignore_broken_pipe};

/// Id of the flag `--config`.
const CONFIG: &str = "config";
/// Id of the flag `--print-config`.
pub(crate) const PRINT_CONFIG: &str = "print-config";

/// Default timeout of a call of a command on objects.
const COMMAND_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// A component with commands.
pub(crate) trait CommandSettings: Component {
    /// Returns the defaults of the commands.
    fn command_defaults() -> Self {
        Self::default()
    }
}

impl CommandSettings for MasterConfig {}

impl CommandSettings for NodeConfig {}

impl CommandSettings for StoreConfig {
    /// A user at a terminal waits longer than a program that can compute instead.
    fn command_defaults() -> StoreConfig {
        StoreConfig { timeout: COMMAND_TIMEOUT_DEFAULT, ..StoreConfig::default() }
    }
}

/// Settings on a command line.
#[derive(Clone, Debug)]
pub(crate) struct SettingsArgs<C> {
    config: Option<PathBuf>,
    print_config: bool,
    /// Keys and values of the given flags.
    flags: Vec<(String, String)>,
    component: PhantomData<C>,
}

impl<C: CommandSettings> SettingsArgs<C> {
    /// Merges defaults, file, environment and flags, and checks the result.
    pub(crate) fn load(&self) -> Result<Loaded<C>, CommandError> {
        let loaded = self.load_with(process_environment()).map_err(CommandError::usage)?;
        loaded.check().map_err(CommandError::usage)?;
        Ok(loaded)
    }

    fn load_with(
        &self,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Loaded<C>, SettingsError> {
        let flags = self.flags.iter().map(|(key, text)| (key.as_str(), text.as_str()));
        load(C::command_defaults(), self.config.as_deref(), environment, flags)
    }

    /// Whether `--print-config` is given.
    pub(crate) fn is_print(&self) -> bool {
        self.print_config
    }

    /// Prints the settings as a file.
    pub(crate) fn print(&self, config: &C) -> Result<(), CommandError> {
        let printed = to_toml(config, &C::command_defaults());
        ignore_broken_pipe(std::io::stdout().write_all(printed.as_bytes()))
    }
}

/// Certificate of a command that reads admin pages, and has no other settings of a client.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct CertificateArgs {
    /// CA certificates in PEM format, from which the certificate of the process must come; none for no TLS [env: MOONTIDE_CA]
    #[arg(long, value_name = "PATH", help_heading = "Settings")]
    ca: Option<String>,
    /// Certificate of an operator in PEM format [env: MOONTIDE_CERT]
    #[arg(long, value_name = "PATH", help_heading = "Settings")]
    cert: Option<String>,
    /// Its private key in PEM format [env: MOONTIDE_KEY]
    #[arg(long, value_name = "PATH", help_heading = "Settings")]
    key: Option<String>,
}

impl CertificateArgs {
    /// Loads the certificate; `None`: no TLS.
    pub(crate) fn load(&self) -> Result<Option<Arc<Credentials>>, CommandError> {
        // As the commands on objects read these settings, without those of calls.
        let variables = ["MOONTIDE_CA", "MOONTIDE_CERT", "MOONTIDE_KEY"];
        let environment = process_environment().filter(|(name, _)| variables.contains(&name.as_str()));
        let flags = [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)];
        let flags = flags.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
        let loaded: Loaded<StoreConfig> =
            load(StoreConfig::default(), None, environment, flags).map_err(CommandError::usage)?;
        loaded.check().map_err(CommandError::usage)?;
        let StoreConfig { ca, cert, key, .. } = loaded.config;
        let files = CredentialFiles::of_settings(ca.as_deref(), cert.as_deref(), key.as_deref());
        let files = files.expect("check() rejects incomplete settings");
        files.map(Credentials::load).transpose().map_err(CommandError::usage)
    }
}

/// Returns the id of the argument of a setting. Arguments of a command may have the name of a setting: `put` has a KEY.
pub(crate) fn argument_id(setting: &str) -> String {
    format!("setting.{setting}")
}

/// Logs environment variables that have the prefix of the component and name no setting.
pub(crate) fn warn_of_unknown_variables<C: Component>(loaded: &Loaded<C>) {
    for variable in &loaded.unknown_variables {
        warn!(variable, prefix = C::PREFIX, "environment variable names no setting; ignored");
    }
}

/// Returns the help text of a setting, with its default.
fn help_of<C: CommandSettings>(setting: &Setting, defaults: &C) -> String {
    let default = defaults.get(&setting.key()).unwrap_or_default();
    let shown = Setting { default, ..setting.clone() }.shown_default();
    let variable = setting.variable.map_or_else(String::new, |variable| format!(" [env: {variable}]"));
    format!("{} [default: {shown}]{variable}", setting.help())
}

impl<C: CommandSettings> ClapArgs for SettingsArgs<C> {
    fn augment_args(command: Command) -> Command {
        let defaults = C::command_defaults();
        let settings = C::table().into_iter().map(|setting| {
            let argument = Arg::new(argument_id(&setting.key()))
                .long(setting.flag())
                .value_name(setting.value.placeholder)
                .help_heading("Settings")
                .help(help_of(&setting, &defaults));
            let argument = match setting.value.form {
                Form::List => argument.action(ArgAction::Append),
                Form::Scalar | Form::Text => argument,
            };
            match setting.alias {
                Some(alias) => argument.visible_alias(alias),
                None => argument,
            }
        });
        command
            .arg(
                Arg::new(CONFIG)
                    .long(CONFIG)
                    .value_name("FILE")
                    .value_parser(value_parser!(PathBuf))
                    .help("TOML file with settings; environment and flags override it"),
            )
            .arg(
                Arg::new(PRINT_CONFIG)
                    .long(PRINT_CONFIG)
                    .action(ArgAction::SetTrue)
                    .help("Print the effective settings as a TOML file and exit"),
            )
            .args(settings)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<C: CommandSettings> FromArgMatches for SettingsArgs<C> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<SettingsArgs<C>, clap::Error> {
        let given = |setting: Setting| {
            // A list can be given by several flags.
            let values: Vec<&str> =
                matches.get_many::<String>(&argument_id(&setting.key()))?.map(String::as_str).collect();
            Some((setting.key(), values.join(",")))
        };
        Ok(SettingsArgs {
            config: matches.get_one(CONFIG).cloned(),
            print_config: matches.get_flag(PRINT_CONFIG),
            flags: C::table().into_iter().filter_map(given).collect(),
            component: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_settings::Settings;
    use std::collections::BTreeSet;
    use std::fmt::Write;
    use std::path::Path;

    fn texts<C: Component>(config: &C) -> Vec<(String, Option<String>)> {
        C::table().iter().map(|setting| (setting.key(), config.get(&setting.key()))).collect()
    }

    fn loaded<C: CommandSettings>(
        file: Option<&str>,
        environment: &[(String, String)],
        flags: &[String],
    ) -> Result<C, SettingsError> {
        let name = format!("moontide-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name.replace(['(', ')'], ""));
        let mut words = vec!["test".to_owned()];
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
            words.extend(["--config".to_owned(), path.display().to_string()]);
        }
        words.extend(flags.iter().cloned());
        let matches = SettingsArgs::<C>::augment_args(Command::new("test")).get_matches_from(words);
        let args = SettingsArgs::<C>::from_arg_matches(&matches).unwrap();
        let loaded = args.load_with(environment.iter().cloned());
        let _ = std::fs::remove_file(&path);
        loaded.map(|loaded| loaded.config)
    }

    /// Checks that every setting can be set by file, environment and flag to the same effect, that errors name the
    /// source, that help shows the default, and that printed files can be loaded.
    fn check_component<C: CommandSettings>() {
        let defaults = C::command_defaults();
        let help = SettingsArgs::<C>::augment_args(Command::new("test")).render_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut all = defaults.clone();
        let mut refused = 0;
        for setting in C::table() {
            let (key, flag, variable) = (setting.key(), setting.flag(), setting.variable(C::PREFIX));
            let example = setting.value.example.split([',', ' ']).next().unwrap_or_default();
            let choices = setting.value.expected.trim_start_matches("one of ").split(", ");
            let mut samples = [example, "true", "false", "7", "[::1]:7"].into_iter().chain(choices);
            let changed = |text: &str| {
                let mut config = defaults.clone();
                let is_set = config.set(&key, text).is_ok();
                (is_set && config.get(&key) != defaults.get(&key)).then_some(config)
            };
            let (sample, expected) = samples
                .find_map(|text| Some((text, changed(text)?)))
                .unwrap_or_else(|| panic!("no sample for {key}"));
            let file = |text: &str| match setting.section {
                Some(section) => format!("[{section}]\n{} = {text:?}\n", setting.name),
                None => format!("{} = {text:?}\n", setting.name),
            };
            let by_file = |text: &str| loaded::<C>(Some(&file(text)), &[], &[]);
            let by_variable = |text: &str| loaded::<C>(None, &[(variable.clone(), text.to_owned())], &[]);
            let by_flag = |text: &str| loaded::<C>(None, &[], &[format!("--{flag}={text}")]);
            for config in [by_file(sample), by_variable(sample), by_flag(sample)] {
                assert_eq!(texts(&config.unwrap()), texts(&expected), "{key}");
            }
            // A flag overrides a variable, which overrides the file.
            let sources = (file("wrong"), [(variable.clone(), sample.to_owned())]);
            if let Err(error) = loaded::<C>(Some(&sources.0), &sources.1, &[]) {
                refused += 1;
                let error = error.to_string();
                assert!(
                    error.contains(&key) && error.contains(".toml:") && error.contains("wrong"),
                    "{error}"
                );
                for (result, source) in
                    [(by_variable("wrong"), &variable), (by_flag("wrong"), &format!("--{flag}"))]
                {
                    let error = result.err().unwrap().to_string();
                    let parts = [source.as_str(), "\"wrong\"", setting.value.expected];
                    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
                }
            }
            let text = help_of(&setting, &defaults).split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.contains("[default: "), "{text}");
            assert!(
                help.contains(&format!("--{flag} <")) && help.contains(&text),
                "{text} is not in\n{help}"
            );
            all.set(&key, sample).unwrap();
        }
        assert!(refused >= C::table().len() / 3, "{refused}");
        for config in [defaults.clone(), all] {
            let printed = to_toml(&config, &defaults);
            let again = loaded::<C>(Some(&printed), &[], &[]).unwrap();
            assert_eq!(texts(&again), texts(&config), "{printed}");
        }
        let unknown = loaded::<C>(Some("no_such_setting = 1\n"), &[], &[]).err().unwrap().to_string();
        assert!(unknown.contains("no_such_setting") && unknown.contains("--print-config"), "{unknown}");
        let variables: BTreeSet<_> = C::table().iter().map(|setting| setting.variable(C::PREFIX)).collect();
        assert_eq!(variables.len(), C::table().len(), "variables are unique");
    }

    #[test]
    fn master_settings_are_equal_in_file_environment_and_flags() {
        check_component::<MasterConfig>();
    }

    #[test]
    fn node_settings_are_equal_in_file_environment_and_flags() {
        check_component::<NodeConfig>();
    }

    #[test]
    fn client_settings_are_equal_in_file_environment_and_flags() {
        check_component::<StoreConfig>();
    }

    #[test]
    fn settings_shared_by_components_have_same_type() {
        let tables = [MasterConfig::table(), NodeConfig::table(), StoreConfig::table()];
        for (at, table) in tables.iter().enumerate() {
            for other in &tables[at + 1..] {
                for (one, same) in table.iter().flat_map(|one| {
                    other.iter().filter(|same| same.key() == one.key()).map(move |same| (one, same))
                }) {
                    assert_eq!(one.value.placeholder, same.value.placeholder, "{}", one.key());
                }
            }
        }
        assert_eq!(StoreConfig::default().master, NodeConfig::default().master);
    }

    /// Returns the table of a component for the reference page.
    fn reference<C: CommandSettings>(title: &str) -> String {
        let defaults = C::default();
        let mut page = format!(
            "## {title}\n\n| setting | variable | default | value | description |\n|---|---|---|---|---|\n"
        );
        for setting in C::table() {
            let default = defaults.get(&setting.key()).unwrap_or_default();
            let shown = Setting { default, ..setting.clone() }.shown_default();
            let details = setting.details().join(" ");
            let help = format!("{}{}{details}", setting.help(), if details.is_empty() { "" } else { ". " });
            let _ = writeln!(
                page,
                "| `{}` | `{}` | {shown} | {} | {} |",
                setting.key(),
                setting.variable(C::PREFIX),
                setting.value,
                help.trim_end_matches('.').replace('|', "\\|").replace('<', "&lt;"),
            );
        }
        page
    }

    #[test]
    fn reference_page_lists_all_settings() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let start = page.find("## Master\n").expect("the page has a section for the master");
        let tables = [
            reference::<MasterConfig>("Master"),
            reference::<NodeConfig>("Node"),
            reference::<StoreConfig>("Client"),
        ];
        let expected = format!("{}{}", &page[..start], tables.join("\n"));
        if std::env::var_os("MOONTIDE_UPDATE_DOCS").is_some() {
            std::fs::write(&path, &expected).unwrap();
        } else {
            assert_eq!(page, expected, "run this test with MOONTIDE_UPDATE_DOCS=1 to update the page");
        }
    }
}
