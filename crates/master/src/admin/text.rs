//! Text encoding of bytes: keys, cursors, query strings.
//!
//! A key is arbitrary bytes. A key of UTF-8 without control characters and without `%` is shown unchanged; other keys
//! are percent-escaped, byte by byte. Therefore percent-decoding of the text always returns the key, the text can be
//! used in the query of a URL, escaped by a client or copied unchanged, and it never takes more than one line.

/// Formats a key.
pub(super) fn show_key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.contains(|c: char| c.is_control() || c == '%') => text.to_owned(),
        _ => escape(key),
    }
}

/// Escapes all bytes except ASCII alphanumerics and `-._~/:` as `%XX`.
fn escape(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte) {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Decodes `%XX` to bytes. Returns `None` if a `%` is not followed by two hexadecimal digits.
pub(super) fn unescape(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%' {
            let (digits, after) = after.split_first_chunk::<2>()?;
            out.push(hex_byte(*digits)?);
            rest = after;
        } else {
            out.push(byte);
            rest = after;
        }
    }
    Some(out)
}

fn hex_byte([high, low]: [u8; 2]) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    Some((digit(high)? << 4 | digit(low)?) as u8) // ≤ 255
}

/// Formats bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses hexadecimal digits.
pub(super) fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_chunks::<2>() else { return None };
    pairs.iter().map(|&pair| hex_byte(pair)).collect()
}

/// A query string `name=value&…` with escaped values.
#[derive(Clone, Copy)]
pub(super) struct Query<'a>(pub(super) &'a str);

impl<'a> Query<'a> {
    /// Returns the first value of `name`, escaped.
    pub(super) fn raw(&self, name: &str) -> Option<&'a [u8]> {
        self.0.split('&').find_map(|pair| match pair.split_once('=') {
            Some((found, value)) => (found == name).then_some(value.as_bytes()),
            None => (pair == name).then_some(&b""[..]),
        })
    }

    /// Returns the first value of `name`, decoded. A `+` is a space, as in HTML forms.
    pub(super) fn bytes(&self, name: &str) -> Option<Option<Vec<u8>>> {
        self.raw(name).map(decode_value)
    }
}

/// Decodes a value of a query, or a part of one.
pub(super) fn decode_value(raw: &[u8]) -> Option<Vec<u8>> {
    let spaced: Vec<u8> = raw.iter().map(|&byte| if byte == b'+' { b' ' } else { byte }).collect();
    unescape(&spaced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_key_round_trips() {
        let keys: &[&[u8]] =
            &[b"a/b:c", "größe 7".as_bytes(), b"100%", b"two\nlines", &[0, 255, b'a'], b"a+b,c&d=e"];
        for &key in keys {
            let shown = show_key(key);
            assert_eq!(unescape(shown.as_bytes()).as_deref(), Some(key), "{shown}");
            assert!(!shown.contains('\n'));
        }
        assert_eq!(show_key("größe 7".as_bytes()), "größe 7");
        assert_eq!(show_key(&[0xff, b'a']), "%FFa");
    }

    #[test]
    fn query_values_decode_to_bytes() {
        let query = Query("key=%ff%00+a&empty=&flag&key=second");
        assert_eq!(query.bytes("key"), Some(Some(vec![255, 0, b' ', b'a'])));
        assert_eq!(query.bytes("empty"), Some(Some(vec![])));
        assert_eq!(query.bytes("flag"), Some(Some(vec![])));
        assert_eq!(query.bytes("other"), None);
        assert_eq!(Query("key=%f").bytes("key"), Some(None));
    }

    #[test]
    fn hexadecimal_round_trips() {
        assert_eq!(from_hex(hex(&[0, 1, 254]).as_bytes()), Some(vec![0, 1, 254]));
        assert_eq!((from_hex(b"abc"), from_hex(b"zz")), (None, None));
    }
}
