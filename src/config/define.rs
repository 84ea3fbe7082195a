//! How a setting is defined, in one place: key, type, default, reader (which checks the range) and help. The
//! validated struct, the built-in defaults, `config/default.toml` and the output of `sconce check-config` are derived
//! from that definition. Defines no setting itself.

use super::read::Reader;

/// A setting as its section defines it.
pub(super) struct Key {
    /// Its name in files, and the name of its field.
    pub(super) name: &'static str,
    /// The default, as TOML.
    pub(super) default: &'static str,
    /// Lines of help, each beginning with the space that follows `///`.
    pub(super) help: &'static [&'static str],
}

/// A section's settings, in the order in which files show them.
pub(super) struct Outline {
    /// Lines of help of the section as a whole.
    pub(super) about: &'static [&'static str],
    pub(super) keys: &'static [Key],
    /// Sections within it, by key.
    pub(super) nested: Vec<(&'static str, Outline)>,
    /// Whether its values are never shown.
    pub(super) has_secrets: bool,
}

/// A section of the settings, read and validated.
pub(super) trait Section: Sized {
    /// The definitions of its settings.
    fn outline() -> Outline;

    /// Reads the section. None if something is wrong; the reader has then reported it.
    fn read(reader: Reader<'_>) -> Option<Self>;
}

/// Defines a section: a struct with a public field for each setting, and its [`Section`].
///
/// - `key: Type = default, reader;` is a setting.
/// - `nested key: Type;` is a section within this one.
/// - `derived key: Type, doc;` is a field that is no setting: reading fills it with its type's default, and other code
///   sets it.
/// - `check` gets the section when each of its settings is valid, and reports combinations that are not.
macro_rules! section {
    (
        $(#[doc = $about:literal])+
        $name:ident {
            $($(#[doc = $help:literal])+ $key:ident: $type:ty = $default:tt, $read:expr;)*
            $(nested $nested:ident: $section:ty;)*
            $(derived $derived:ident: $derived_type:ty, $derived_doc:literal;)*
        }
        $(check $check:expr)?
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        pub struct $name {
            $($(#[doc = $help])+ pub $key: $type,)*
            $(#[doc = concat!("Its section `", stringify!($nested), "`.")] pub $nested: $section,)*
            $(#[doc = $derived_doc] pub $derived: $derived_type,)*
        }

        impl $crate::config::define::Section for $name {
            fn outline() -> $crate::config::define::Outline {
                use $crate::config::define::{Key, Outline};
                Outline {
                    about: &[$($about),+],
                    keys: &[$(Key {
                        name: stringify!($key),
                        default: stringify!($default),
                        help: &[$($help),+],
                    }),*],
                    nested: vec![$((stringify!($nested), <$section as $crate::config::define::Section>::outline())),*],
                    has_secrets: false,
                }
            }

            fn read(mut reader: $crate::config::read::Reader<'_>) -> Option<Self> {
                $(let $key = reader.read(stringify!($key), $read);)*
                $(let $nested = reader
                    .section(stringify!($nested))
                    .and_then(<$section as $crate::config::define::Section>::read);)*
                let build = || Some(Self {
                    $($key: $key?,)*
                    $($nested: $nested?,)*
                    $($derived: Default::default(),)*
                });
                let section = build();
                $(if let Some(section) = &section {
                    let check: fn(&Self, &mut $crate::config::read::Reader<'_>) = $check;
                    check(section, &mut reader);
                })?
                reader.finish();
                section
            }
        }
    };
}
pub(super) use section;

/// The comment at the top of `config/default.toml`.
const INTRODUCTION: &str = "\
# All settings with their defaults. Generated from their definitions in src/config/settings.rs by
# `make default-settings`; a test compares them. Later layers win:
#
#   built-in defaults  <  files given with --config  <  AMQP_URL  <  SCONCE_… variables  <  flags
#
# Copy what you want to change into a file of your own; what you leave out keeps the value below.
# A variable spells a setting in capitals, with two underscores between levels and a pool's number
# counted from 0:
#
#   SCONCE_BROKER__URL=amqp://user:password@rabbit/%2f
#   SCONCE_POOL__0__BATCH__MAX_TOKENS=16384
#
# The same as flags: --set broker.url=…   --set pool[0].batch.max_tokens=16384
#
# Durations carry a unit (\"5ms\", \"2s\", \"1m30s\", \"1h\"), and so do sizes (\"100B\", \"512KiB\", \"8MB\",
# \"16MiB\"). `sconce check-config` shows the settings in force, and where each one came from.
";

/// The text of `config/default.toml`: every setting with its help and its default.
pub(super) fn default_file(sections: &[(&str, Outline)]) -> String {
    let mut text = INTRODUCTION.to_owned();
    for (key, outline) in sections {
        write_section(&mut text, key, outline);
    }
    text
}

fn write_section(text: &mut String, path: &str, outline: &Outline) {
    text.push('\n');
    write_comment(text, outline.about);
    text.push_str(&format!("{}\n", header(path)));
    for Key { name, default, help } in outline.keys {
        write_comment(text, help);
        text.push_str(&format!("{name} = {default}\n"));
    }
    for (key, nested) in &outline.nested {
        write_section(text, &format!("{path}.{key}"), nested);
    }
}

/// The TOML header of the section at `path`. Pools are an array of tables, because there may be several.
pub(super) fn header(path: &str) -> String {
    if path == "pool" { "[[pool]]".to_owned() } else { format!("[{path}]") }
}

fn write_comment(text: &mut String, lines: &[&str]) {
    for line in lines {
        text.push_str(&format!("#{line}\n"));
    }
}
