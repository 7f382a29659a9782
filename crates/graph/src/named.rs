//! Enums whose variants have names.

/// An enum of variants with names, such as `/// all of it` `Whole = "whole",`: gives it `ALL`, `name`, `find` and `Display`.
#[macro_export]
macro_rules! named {
    ($(#[$about:meta])* $visibility:vis enum $type:ident { $($(#[$meaning:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$about])*
        $visibility enum $type {
            $($(#[$meaning])* $variant,)+
        }

        impl $type {
            /// All of them, in order.
            pub const ALL: [$type; [$($name),+].len()] = [$($type::$variant),+];

            /// The name in text, in JSON and on the command line.
            pub fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)+
                }
            }

            /// The variant with this name.
            pub fn find(name: &str) -> Option<$type> {
                $type::ALL.into_iter().find(|known| known.name() == name)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
