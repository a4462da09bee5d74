//! A value from the file or a flag, before its key parses it.
//!
//! One type for both, so that `--command-timeout 5s` and `command-timeout = "5s"` share parsing, limits and errors.

use std::ops::RangeInclusive;
use std::time::Duration;

use switchyard_control::nodes::{ENDPOINT_FORM, Endpoint};
use switchyard_resp::units::{self, SIZE_FORM, TIME_FORM};
use toml::de::DeValue;

use super::listener::ListenPlace;

/// A value before type checking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Raw {
    Text(String),
    /// As written, because TOML integers have several radixes and sizes.
    Integer(String),
    Bool(bool),
    List(Vec<Raw>),
    /// Name of a type that no key accepts.
    Other(&'static str),
}

impl Raw {
    pub(crate) fn from_toml(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Raw::Text(text.to_string()),
            DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => Raw::Integer(number.to_string()),
                Err(_) => Raw::Other("a number out of range"),
            },
            DeValue::Boolean(flag) => Raw::Bool(*flag),
            DeValue::Array(items) => Raw::List(items.iter().map(|item| Raw::from_toml(item.get_ref())).collect()),
            DeValue::Float(_) => Raw::Other("a number with a fraction"),
            DeValue::Datetime(_) => Raw::Other("a date"),
            DeValue::Table(_) => Raw::Other("a table"),
        }
    }

    /// Parses a flag: a list in the syntax of the file, or plain text.
    pub(crate) fn from_flag(text: &str) -> Self {
        // `[::1]:6380` starts like a list but is text.
        match DeValue::parse(text) {
            Ok(value) if text.starts_with('[') => Self::from_toml(value.get_ref()),
            _ => Raw::Text(text.to_owned()),
        }
    }

    /// The value as written, for errors. Never called for secrets.
    pub(crate) fn shown(&self) -> String {
        match self {
            Raw::Text(text) => format!("{text:?}"),
            Raw::Integer(number) => number.clone(),
            Raw::Bool(flag) => flag.to_string(),
            Raw::List(items) => format!("[{}]", items.iter().map(Raw::shown).collect::<Vec<_>>().join(", ")),
            Raw::Other(kind) => (*kind).to_owned(),
        }
    }

    fn wrong<T>(&self, expected: impl std::fmt::Display) -> Result<T, String> {
        Err(format!("{} is not {expected}", self.shown()))
    }

    /// Text of a string or number.
    fn scalar(&self) -> Option<&str> {
        match self {
            Raw::Text(text) | Raw::Integer(text) => Some(text),
            _ => None,
        }
    }

    /// Returns non-empty text. The error does not repeat the value, which may be a secret in the wrong place.
    pub(crate) fn text(&self) -> Result<&str, String> {
        match self {
            Raw::Text(text) if text.is_empty() => Err("the value is empty; leave the key out instead".to_owned()),
            Raw::Text(text) => Ok(text),
            _ => Err("the value is not text; put it in quotes".to_owned()),
        }
    }

    /// Returns a text or a list of texts. A flag may separate them by commas.
    pub(crate) fn texts(&self) -> Result<Vec<String>, String> {
        match self {
            Raw::List(items) => items.iter().map(|item| item.text().map(str::to_owned)).collect(),
            Raw::Text(text) if text.starts_with('[') && (text.ends_with(']') || text.contains(['"', '\''])) => {
                // The shell removed the quotes, or one is missing.
                Err(r#"the value looks like a list but is invalid. A list is written in quotes for the shell, as in '["one", "another"]', or without brackets, as in one,another"#.to_owned())
            }
            one => Ok(one.text()?.split(',').map(|part| part.trim().to_owned()).collect()),
        }
    }

    /// Returns a command line: a program and its arguments. Arguments may be empty.
    pub(crate) fn command_line(&self) -> Result<Vec<String>, String> {
        let Raw::List(words) = self else { return self.wrong("a list such as [\"program\", \"argument\"]") };
        if words.first().is_some_and(|program| *program == Raw::Text(String::new())) {
            return Err("the program has no name".to_owned());
        }
        let word = |word: &Raw| {
            word.scalar().map(str::to_owned).ok_or_else(|| "one of its words is not text; put it in quotes".to_owned())
        };
        words.iter().map(word).collect()
    }

    pub(crate) fn switch(&self) -> Result<bool, String> {
        match self {
            Raw::Bool(flag) => Ok(*flag),
            Raw::Text(text) if text == "true" => Ok(true),
            Raw::Text(text) if text == "false" => Ok(false),
            _ => self.wrong("true or false"),
        }
    }

    pub(crate) fn count(&self, range: RangeInclusive<u64>) -> Result<u64, String> {
        match self.scalar().and_then(|text| text.trim().parse().ok()) {
            Some(number) if range.contains(&number) => Ok(number),
            _ => self.wrong(format_args!("a whole number from {} to {}", range.start(), range.end())),
        }
    }

    pub(crate) fn size(&self, range: RangeInclusive<u64>) -> Result<usize, String> {
        let Some(bytes) = self.scalar().and_then(units::parse_size) else {
            return self.wrong(SIZE_FORM);
        };
        match usize::try_from(bytes) {
            Ok(size) if range.contains(&bytes) => Ok(size),
            _ => Err(format!(
                "{} is out of range; allowed is {} to {}",
                self.shown(),
                units::format_size(*range.start()),
                units::format_size(*range.end())
            )),
        }
    }

    /// Parses bytes per second, with a unit.
    pub(crate) fn rate(&self, most: u64) -> Result<u64, String> {
        let Some(text) = self.scalar() else { return self.wrong(units::RATE_FORM) };
        match units::parse_rate(text)? {
            rate if rate <= most => Ok(rate),
            _ => Err(format!("{} is out of range; allowed is 0 to {}", self.shown(), units::format_size(most))),
        }
    }

    pub(crate) fn time(&self, range: RangeInclusive<Duration>) -> Result<Duration, String> {
        match self.scalar().and_then(units::parse_time) {
            None => self.wrong(TIME_FORM),
            Some(time) if range.contains(&time) => Ok(time),
            Some(_) => Err(format!(
                "{} is out of range; allowed is {} to {}",
                self.shown(),
                units::format_time(*range.start()),
                units::format_time(*range.end())
            )),
        }
    }

    pub(crate) fn endpoint(&self, default_port: Option<u16>) -> Result<Endpoint, String> {
        match self {
            Raw::Text(text) => Endpoint::parse(text, default_port).map_err(|why| format!("{}: {why}", self.shown())),
            _ => self.wrong(ENDPOINT_FORM),
        }
    }

    /// Returns an address to listen on, or a list of them.
    pub(crate) fn listen_places(&self) -> Result<Vec<ListenPlace>, String> {
        match self {
            Raw::List(items) if items.is_empty() => Err("the list is empty; it needs at least one address".to_owned()),
            Raw::List(items) => items.iter().map(Raw::listen_place).collect(),
            one => Ok(vec![one.listen_place()?]),
        }
    }

    pub(crate) fn listen_place(&self) -> Result<ListenPlace, String> {
        match self {
            Raw::Text(text) => ListenPlace::parse(text).map_err(|why| format!("{}: {why}", self.shown())),
            _ => self.wrong(ENDPOINT_FORM),
        }
    }

    /// Returns an address, or a list of them.
    pub(crate) fn endpoints(&self, default_port: Option<u16>) -> Result<Vec<Endpoint>, String> {
        match self {
            Raw::List(items) if items.is_empty() => Err("the list is empty; it needs at least one address".to_owned()),
            Raw::List(items) => items.iter().map(|item| item.endpoint(default_port)).collect(),
            one => Ok(vec![one.endpoint(default_port)?]),
        }
    }
}
