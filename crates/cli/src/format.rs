//! Formatting and parsing of keys.
//!
//! Keys are bytes. Printable characters are shown unchanged; `%`, control characters and bytes that are not UTF-8 are
//! percent-escaped. So a key cannot send control sequences to a terminal, and every line can be converted back to its
//! key.

use std::fmt::Write;

/// Formats a key, percent-escaped.
pub(crate) fn escaped(key: &[u8]) -> String {
    let mut shown = String::with_capacity(key.len());
    let escape = |shown: &mut String, bytes: &[u8]| {
        for byte in bytes {
            let _ = write!(shown, "%{byte:02X}");
        }
    };
    for chunk in key.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c == '%' || c.is_control() {
                escape(&mut shown, c.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                shown.push(c);
            }
        }
        escape(&mut shown, chunk.invalid());
    }
    shown
}

/// Parses the output of [`escaped`] back into the key.
pub(crate) fn unescaped(shown: &[u8]) -> Result<Vec<u8>, String> {
    let mut key = Vec::with_capacity(shown.len());
    let mut rest = shown;
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            key.push(*first);
            continue;
        }
        let byte = tail
            .get(..2)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            .ok_or(
                "a % in an escaped key must be followed by two hexadecimal digits; use %25 for the % sign itself",
            )?;
        key.push(byte);
        rest = &tail[2..];
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn control_bytes_in_keys_are_escaped() {
        assert_eq!(escaped(b"model/7b/\xffblock\x1b[2J 100%"), "model/7b/%FFblock%1B[2J 100%25");
        assert_eq!(escaped("größe".as_bytes()), "größe");
        assert!(unescaped(b"%").is_err());
        assert!(unescaped(b"%+1").is_err());
    }

    proptest! {
        #[test]
        fn key_escaping_round_trips(key: Vec<u8>) {
            prop_assert_eq!(unescaped(escaped(&key).as_bytes()), Ok(key));
        }
    }
}
