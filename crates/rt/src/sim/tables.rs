//! [`HashMap`] and [`HashSet`]: those of hashbrown, with a hash key that follows from the seed of the world.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher};
use std::ops::{Deref, DerefMut, Index};

use super::world::World;

/// Hashes with the key of the world in which the table was created, or with 0.
#[derive(Clone, Debug)]
pub struct WorldHash {
    key: u64,
}

impl Default for WorldHash {
    fn default() -> WorldHash {
        WorldHash { key: World::current().map_or(0, |world| world.hash_key()) }
    }
}

impl BuildHasher for WorldHash {
    type Hasher = DefaultHasher;

    fn build_hasher(&self) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.key);
        hasher
    }
}

macro_rules! table {
    ($name:ident<$($parameter:ident),+>, $item:ty, $iter:ident, $into_iter:ident, $module:ident) => {
        /// A hash table with the functions of hashbrown's.
        pub struct $name<$($parameter),+>(hashbrown::$name<$($parameter,)+ WorldHash>);

        impl<$($parameter),+> $name<$($parameter),+> {
            /// Creates an empty table.
            pub fn new() -> Self {
                Self::default()
            }

            /// Creates an empty table with space for `capacity` elements.
            pub fn with_capacity(capacity: usize) -> Self {
                Self(hashbrown::$name::with_capacity_and_hasher(capacity, WorldHash::default()))
            }
        }

        impl<$($parameter),+> Default for $name<$($parameter),+> {
            fn default() -> Self {
                Self(hashbrown::$name::with_hasher(WorldHash::default()))
            }
        }

        impl<$($parameter),+> Deref for $name<$($parameter),+> {
            type Target = hashbrown::$name<$($parameter,)+ WorldHash>;

            fn deref(&self) -> &Self::Target {
                &self.0
            }
        }

        impl<$($parameter),+> DerefMut for $name<$($parameter),+> {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.0
            }
        }

        impl<$($parameter: Clone),+> Clone for $name<$($parameter),+> {
            fn clone(&self) -> Self {
                Self(self.0.clone())
            }
        }

        impl<$($parameter: fmt::Debug),+> fmt::Debug for $name<$($parameter),+> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl<$($parameter: Eq + Hash),+> PartialEq for $name<$($parameter),+> {
            fn eq(&self, other: &Self) -> bool {
                self.0 == other.0
            }
        }

        impl<$($parameter: Eq + Hash),+> Eq for $name<$($parameter),+> {}

        impl<$($parameter),+> IntoIterator for $name<$($parameter),+> {
            type Item = $item;
            type IntoIter = hashbrown::$module::IntoIter<$($parameter),+>;

            fn into_iter(self) -> Self::IntoIter {
                self.0.into_iter()
            }
        }

        impl<'a, $($parameter),+> IntoIterator for &'a $name<$($parameter),+> {
            type Item = <&'a hashbrown::$name<$($parameter,)+ WorldHash> as IntoIterator>::Item;
            type IntoIter = hashbrown::$module::Iter<'a, $($parameter),+>;

            fn into_iter(self) -> Self::IntoIter {
                self.0.iter()
            }
        }
    };
}

table!(HashMap<K, V>, (K, V), Iter, IntoIter, hash_map);
table!(HashSet<T>, T, Iter, IntoIter, hash_set);

impl<'a, K, V> IntoIterator for &'a mut HashMap<K, V> {
    type Item = (&'a K, &'a mut V);
    type IntoIter = hashbrown::hash_map::IterMut<'a, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut()
    }
}

impl<K: Eq + Hash, V> FromIterator<(K, V)> for HashMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(items: I) -> Self {
        let mut map = Self::new();
        map.extend(items);
        map
    }
}

impl<K: Eq + Hash, V> Extend<(K, V)> for HashMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, items: I) {
        self.0.extend(items);
    }
}

impl<K: Eq + Hash + Borrow<Q>, Q: Eq + Hash + ?Sized, V> Index<&Q> for HashMap<K, V> {
    type Output = V;

    fn index(&self, key: &Q) -> &V {
        self.0.get(key).expect("the key is in the table")
    }
}

impl<T: Eq + Hash> FromIterator<T> for HashSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut set = Self::new();
        set.extend(items);
        set
    }
}

impl<T: Eq + Hash> Extend<T> for HashSet<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        self.0.extend(items);
    }
}

impl<'a, T: Eq + Hash + Copy + 'a> Extend<&'a T> for HashSet<T> {
    fn extend<I: IntoIterator<Item = &'a T>>(&mut self, items: I) {
        self.0.extend(items);
    }
}

impl<K, V> HashMap<K, V> {
    /// Returns the values.
    pub fn into_values(self) -> impl Iterator<Item = V> {
        self.0.into_values()
    }
}
