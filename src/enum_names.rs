//! Enums whose values have names in settings, metrics or messages. Each name is written once, beside its value.

/// Defines enums. `enum State as name` has the function `State::name`, and `State::ALL` with each value and its name.
macro_rules! named_enum {
    ($($(#[$meta:meta])* $vis:vis enum $enum:ident as $name:ident {
        $($(#[$variant_meta:meta])* $variant:ident $(= $code:literal)? => $text:literal,)+
    })+) => {$(
        $(#[$meta])*
        $vis enum $enum {
            $($(#[$variant_meta])* $variant $(= $code)?,)+
        }

        impl $enum {
            /// All values in order, each with its name.
            pub const ALL: [(Self, &'static str); [$($text),+].len()] = [$((Self::$variant, $text)),+];

            /// The name of this value.
            #[allow(dead_code, reason = "some enums are only found by their names")]
            pub fn $name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }
    )+};
}
