//! [`EtcdUser`]: user of etcd, and its token.
//!
//! etcd gives a token for name and password. Each call has the token in its metadata. A token ends after some minutes without use,
//! with a restart of etcd, and with a change of users or roles; the call that is refused then gets a new token and is made again.
//! etcd checks the token before it executes a call, so a refused call has changed nothing.

use std::fmt;
use std::path::PathBuf;

use parking_lot::Mutex;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Status};

use super::wire::AuthenticateRequest;

/// Variable with the password, if no file is given.
pub const ETCD_PASSWORD_VARIABLE: &str = "MOONTIDE_ETCD_PASSWORD";

/// Most bytes of a file with a password.
const PASSWORD_BYTES_MAX: u64 = 4096;

/// Name and password of a user of etcd. The password is not in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUser {
    /// Name.
    pub name: String,
    /// File with the password; `None`: it is in the variable [`ETCD_PASSWORD_VARIABLE`].
    pub password_file: Option<PathBuf>,
}

impl EtcdUser {
    /// Returns the password. `variable`: value of the variable.
    ///
    /// # Errors
    /// If there is none. The text says what to do.
    pub(super) fn password(&self, variable: Option<String>) -> Result<String, String> {
        let Some(path) = &self.password_file else {
            return variable.filter(|password| !password.is_empty()).ok_or_else(|| {
                format!(
                    "there is no password of user {:?}; set the variable {ETCD_PASSWORD_VARIABLE}, or add \
                     &password_file=FILE to the address",
                    self.name
                )
            });
        };
        let unusable = |reason: &dyn fmt::Display| {
            format!("cannot read the password of user {:?} from {}: {reason}", self.name, path.display())
        };
        let len = std::fs::metadata(path).map_err(|error| unusable(&error))?.len();
        if len > PASSWORD_BYTES_MAX {
            return Err(unusable(&format!("it has {len} bytes, more than {PASSWORD_BYTES_MAX}")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| unusable(&error))?;
        // Editors end a file with a newline.
        let password =
            text.strip_suffix('\n').map_or(text.as_str(), |line| line.strip_suffix('\r').unwrap_or(line));
        if password.is_empty() { Err(unusable(&"it is empty")) } else { Ok(password.to_owned()) }
    }

    /// Returns the request for a token, with the current password.
    pub(super) fn request(&self) -> Result<AuthenticateRequest, Status> {
        let password = self.password(std::env::var(ETCD_PASSWORD_VARIABLE).ok());
        let password = password.map_err(Status::unauthenticated)?;
        Ok(AuthenticateRequest { name: self.name.clone(), password })
    }

    /// Explains why etcd gave no token.
    pub(super) fn refused(&self, status: Status) -> Status {
        if status.code() != Code::InvalidArgument {
            return status;
        }
        let of = match &self.password_file {
            Some(path) => path.display().to_string(),
            None => format!("the variable {ETCD_PASSWORD_VARIABLE}"),
        };
        let reason = status.message();
        Status::unauthenticated(format!("wrong user {:?}, or wrong password in {of} ({reason})", self.name))
    }
}

/// What a call sends to say which user makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UserToken {
    /// Nothing: there is no user, or etcd has no authentication enabled.
    NotNeeded,
    /// The token of the user.
    Token(MetadataValue<Ascii>),
}

/// User of an etcd, if there is one, with the token in use.
#[derive(Debug)]
pub(super) struct UserState {
    pub(super) user: Option<EtcdUser>,
    token: Mutex<Option<UserToken>>,
    /// Held by the call that gets a token, so that others wait for it instead of getting their own: etcd computes an expensive hash
    /// for each.
    pub(super) authenticating: tokio::sync::Mutex<()>,
}

impl UserState {
    pub(super) fn new(user: Option<EtcdUser>) -> UserState {
        UserState { user, token: Mutex::new(None), authenticating: tokio::sync::Mutex::new(()) }
    }

    /// Returns the token in use; `None`: one must be got.
    pub(super) fn token(&self) -> Option<UserToken> {
        if self.user.is_none() { Some(UserToken::NotNeeded) } else { self.token.lock().clone() }
    }

    /// Puts a new token in use.
    pub(super) fn set(&self, token: UserToken) {
        *self.token.lock() = Some(token);
    }

    /// Takes a token out of use, unless another call has replaced it.
    pub(super) fn forget(&self, refused: &UserToken) {
        let mut token = self.token.lock();
        if token.as_ref() == Some(refused) {
            *token = None;
        }
    }

    /// Returns whether a call was refused because of its token, not because of the rights of its user.
    pub(super) fn is_refused(&self, status: &Status) -> bool {
        // Texts of etcd, which has codes of gRPC only: for a token that has ended; for one from before a change of users; and for no
        // token, if authentication was enabled meanwhile.
        let texts = ["invalid auth token", "revision of auth store is old", "user name is empty"];
        self.user.is_some() && texts.iter().any(|text| status.message().contains(text))
    }
}

/// Returns whether etcd says that it has no authentication enabled.
pub(super) fn is_not_enabled(status: &Status) -> bool {
    status.code() == Code::FailedPrecondition && status.message().contains("authentication is not enabled")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_is_read_from_file_or_variable_and_its_absence_says_what_to_do() {
        let user = |password_file| EtcdUser { name: "m".into(), password_file };
        assert_eq!(user(None).password(Some("secret".into())), Ok("secret".into()));
        for nothing in [None, Some(String::new())] {
            let error = user(None).password(nothing).unwrap_err();
            assert!(error.contains(ETCD_PASSWORD_VARIABLE) && error.contains("password_file"), "{error}");
        }
        let path = std::env::temp_dir().join(format!("moontide-password-{}", std::process::id()));
        let of = |content: &str| {
            std::fs::write(&path, content).unwrap();
            user(Some(path.clone())).password(Some("of the variable".into()))
        };
        for (content, password) in [("a b", "a b"), ("a b\n", "a b"), ("a\r\n", "a"), ("a\n\n", "a\n")] {
            assert_eq!(of(content), Ok(password.into()), "{content:?}");
        }
        assert!(of("\n").unwrap_err().contains("it is empty"));
        assert!(of(&"a".repeat(5000)).unwrap_err().contains("5000 bytes"));
        std::fs::remove_file(&path).unwrap();
        let error = user(Some(path.clone())).password(None).unwrap_err();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
    }
}
